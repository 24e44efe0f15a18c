/*
 * config.h: command-line flags as one typed struct, from the table in config.def.
 */
#ifndef LK_BASE_CONFIG_H
#define LK_BASE_CONFIG_H

#include "base/status.h"

#define FLAG_STR(field, flag, def, choices, help)  const char *field;
#define FLAG_U64(field, flag, def, min, max, help) uint64_t field;
#define FLAG_I64(field, flag, def, min, max, help) int64_t field;
#define FLAG_F64(field, flag, def, min, max, help) double field;
#define FLAG_BOOL(field, flag, def, help)          bool field;
#define FLAG_ONLY(flag, value, help)
typedef struct {
#include "base/config.def"
} lk_config_t;
#undef FLAG_STR
#undef FLAG_U64
#undef FLAG_I64
#undef FLAG_F64
#undef FLAG_BOOL
#undef FLAG_ONLY

/* Parses argv[1..argc-1]. Strings point into argv. One positional argument is the model. Both
 * "--flag value" and "--flag=value". LK_ERR_INVALID names the flag and says what is accepted. */
LK_MUST_USE lk_status_t config_parse(int argc, char *const *argv, lk_config_t *out,
                                     lk_error_t *err);
/* What config_parse fills in when argc is 1. */
void config_defaults(lk_config_t *out);
/* The table as a --help text on stdout; internal flags left out. */
void config_help(const char *usage);
/* Hash of everything that must be equal on all ranks of a group, as 32 hex digits. */
void config_group_hash(const lk_config_t *config, char out[33]);
/* log_level and log_format to lk_log_init. */
void config_init_log(const lk_config_t *config, const char *who);

#endif
