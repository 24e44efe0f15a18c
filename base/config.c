#include "base/config.h"
#include "base/buf.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { KIND_STR, KIND_U64, KIND_I64, KIND_F64, KIND_BOOL, KIND_ONLY } kind_t;

typedef struct {
    kind_t kind;
    const char *flag;
    size_t offset;
    const char *text; /* STR: default; ONLY: the accepted value */
    const char *choices;
    uint64_t u_def, u_min, u_max;
    int64_t i_def, i_min, i_max;
    double f_def, f_min, f_max;
    const char *help;
} row_t;

#define AT(field) offsetof(lk_config_t, field)
#define FLAG_STR(field, flag_, def, choices_, help_)                                               \
    {.kind = KIND_STR,                                                                             \
     .flag = flag_,                                                                                \
     .offset = AT(field),                                                                          \
     .text = def,                                                                                  \
     .choices = choices_,                                                                          \
     .help = help_},
#define FLAG_U64(field, flag_, def, min, max, help_)                                               \
    {.kind = KIND_U64,                                                                             \
     .flag = flag_,                                                                                \
     .offset = AT(field),                                                                          \
     .u_def = def,                                                                                 \
     .u_min = min,                                                                                 \
     .u_max = max,                                                                                 \
     .help = help_},
#define FLAG_I64(field, flag_, def, min, max, help_)                                               \
    {.kind = KIND_I64,                                                                             \
     .flag = flag_,                                                                                \
     .offset = AT(field),                                                                          \
     .i_def = def,                                                                                 \
     .i_min = min,                                                                                 \
     .i_max = max,                                                                                 \
     .help = help_},
#define FLAG_F64(field, flag_, def, min, max, help_)                                               \
    {.kind = KIND_F64,                                                                             \
     .flag = flag_,                                                                                \
     .offset = AT(field),                                                                          \
     .f_def = def,                                                                                 \
     .f_min = min,                                                                                 \
     .f_max = max,                                                                                 \
     .help = help_},
#define FLAG_BOOL(field, flag_, def, help_)                                                        \
    {.kind = KIND_BOOL, .flag = flag_, .offset = AT(field), .u_def = def, .help = help_},
#define FLAG_ONLY(flag_, value, help_)                                                             \
    {.kind = KIND_ONLY, .flag = flag_, .text = value, .help = help_},
static const row_t rows[] = {
#include "base/config.def"
};

static void *field(lk_config_t *config, const row_t *row)
{
    return (char *)config + row->offset;
}

void config_defaults(lk_config_t *out)
{
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        const row_t *row = &rows[i];
        switch (row->kind) {
        case KIND_STR:
            *(const char **)field(out, row) = row->text;
            break;
        case KIND_U64:
            *(uint64_t *)field(out, row) = row->u_def;
            break;
        case KIND_I64:
            *(int64_t *)field(out, row) = row->i_def;
            break;
        case KIND_F64:
            *(double *)field(out, row) = row->f_def;
            break;
        case KIND_BOOL:
            *(bool *)field(out, row) = row->u_def != 0;
            break;
        case KIND_ONLY:
            break;
        }
    }
}

static bool in_choices(const char *choices, const char *value)
{
    size_t n = strlen(value);
    for (const char *p = choices; *p != '\0';) {
        size_t len = strcspn(p, "|");
        if (len == n && memcmp(p, value, n) == 0) {
            return true;
        }
        p += len + (p[len] == '|');
    }
    return false;
}

static lk_status_t set_number(lk_config_t *out, const row_t *row, const char *value,
                              lk_error_t *err)
{
    char *end;
    errno = 0;
    bool ok;
    if (row->kind == KIND_U64) {
        uint64_t x = strtoull(value, &end, 10);
        ok = value[0] >= '0' && value[0] <= '9' && *end == '\0' && errno == 0;
        if (ok && (x < row->u_min || x > row->u_max)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s must be from %llu to %llu, not %s",
                                row->flag, (unsigned long long)row->u_min,
                                (unsigned long long)row->u_max, value);
        }
        *(uint64_t *)field(out, row) = x;
    } else if (row->kind == KIND_I64) {
        long long x = strtoll(value, &end, 10);
        ok = value[0] != '\0' && value[0] != ' ' && *end == '\0' && errno == 0;
        if (ok && (x < row->i_min || x > row->i_max)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s must be from %lld to %lld, not %s",
                                row->flag, (long long)row->i_min, (long long)row->i_max, value);
        }
        *(int64_t *)field(out, row) = x;
    } else {
        double x = strtod(value, &end);
        ok = value[0] != '\0' && value[0] != ' ' && *end == '\0' && errno == 0;
        if (ok && !(x >= row->f_min && x <= row->f_max)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s must be from %g to %g, not %s", row->flag,
                                row->f_min, row->f_max, value);
        }
        *(double *)field(out, row) = x;
    }
    if (!ok) {
        return lk_error_set(err, LK_ERR_INVALID, "%s takes a number, not '%s'", row->flag, value);
    }
    return LK_OK;
}

static lk_status_t set_value(lk_config_t *out, const row_t *row, const char *value, lk_error_t *err)
{
    switch (row->kind) {
    case KIND_STR:
        if (row->choices[0] != '\0' && !in_choices(row->choices, value)) {
            return lk_error_set(err, LK_ERR_INVALID, "%s must be one of %s, not '%s'", row->flag,
                                row->choices, value);
        }
        *(const char **)field(out, row) = value;
        return LK_OK;
    case KIND_ONLY:
        if (strcmp(value, row->text) != 0) {
            return lk_error_set(err, LK_ERR_UNSUPPORTED,
                                "%s %s is not supported; only '%s' is (%s)", row->flag, value,
                                row->text, row->help);
        }
        return LK_OK;
    default:
        return set_number(out, row, value, err);
    }
}

/* The row of `flag` (n bytes); *negated for --no-FLAG of a boolean. */
static const row_t *find(const char *flag, size_t n, bool *negated)
{
    *negated = false;
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        const char *name = rows[i].flag;
        if (strlen(name) == n && memcmp(name, flag, n) == 0) {
            return &rows[i];
        }
        if (rows[i].kind == KIND_BOOL && n == strlen(name) + 3 && memcmp(flag, "--no-", 5) == 0 &&
            memcmp(flag + 5, name + 2, n - 5) == 0) {
            *negated = true;
            return &rows[i];
        }
    }
    return NULL;
}

/* All of it may be said in a JSON reply. */
static lk_status_t check_utf8(int argc, char *const *argv, lk_error_t *err)
{
    for (int i = 1; i < argc; i++) {
        if (!lk_utf8_valid(argv[i], strlen(argv[i]))) {
            char shown[128];
            lk_text(shown, sizeof shown, "%s", argv[i]);
            lk_utf8_clean(shown, strlen(shown));
            return lk_error_set(err, LK_ERR_INVALID, "argument %d ('%s') is not UTF-8", i, shown);
        }
    }
    return LK_OK;
}

lk_status_t config_parse(int argc, char *const *argv, lk_config_t *out, lk_error_t *err)
{
    lk_config_t config;
    config_defaults(&config);
    bool positional = false;
    LK_RETURN_IF_ERROR(check_utf8(argc, argv, err));
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (strncmp(arg, "--", 2) != 0) {
            if (positional) {
                return lk_error_set(err, LK_ERR_INVALID,
                                    "unexpected argument '%s' (the model is '%s')", arg,
                                    config.model);
            }
            config.model = arg;
            positional = true;
            continue;
        }
        size_t n = strcspn(arg, "=");
        const char *value = arg[n] == '=' ? arg + n + 1 : NULL;
        bool negated;
        const row_t *row = find(arg, n, &negated);
        if (row == NULL) {
            return lk_error_set(err, LK_ERR_INVALID, "unknown flag %.*s (see --help)", (int)n, arg);
        }
        if (row->kind == KIND_BOOL || (row->kind == KIND_ONLY && row->text[0] == '\0')) {
            if (value != NULL) {
                return lk_error_set(err, LK_ERR_INVALID, "%s takes no value", row->flag);
            }
            if (row->kind == KIND_BOOL) {
                *(bool *)field(&config, row) = !negated;
            }
            continue;
        }
        if (value == NULL) {
            if (i + 1 >= argc) {
                return lk_error_set(err, LK_ERR_INVALID, "%s needs a value", row->flag);
            }
            value = argv[++i];
        }
        LK_RETURN_IF_ERROR(set_value(&config, row, value, err));
    }
    *out = config;
    return LK_OK;
}

void config_help(const char *usage)
{
    printf("%s\n\n", usage);
    for (size_t i = 0; i < LK_ARRAY_LEN(rows); i++) {
        const row_t *row = &rows[i];
        if (strstr(row->help, "(internal)") != NULL) {
            continue;
        }
        char left[96];
        switch (row->kind) {
        case KIND_STR:
            snprintf(left, sizeof left, "%s %s", row->flag,
                     row->choices[0] != '\0' ? row->choices : "TEXT");
            printf("  %-46s %s%s%s%s\n", left, row->help, row->text[0] != '\0' ? " [" : "",
                   row->text, row->text[0] != '\0' ? "]" : "");
            break;
        case KIND_U64:
            snprintf(left, sizeof left, "%s N", row->flag);
            printf("  %-46s %s [%llu]\n", left, row->help, (unsigned long long)row->u_def);
            break;
        case KIND_I64:
            snprintf(left, sizeof left, "%s N", row->flag);
            printf("  %-46s %s [%lld]\n", left, row->help, (long long)row->i_def);
            break;
        case KIND_F64:
            snprintf(left, sizeof left, "%s X", row->flag);
            printf("  %-46s %s [%g]\n", left, row->help, row->f_def);
            break;
        case KIND_BOOL:
            snprintf(left, sizeof left, "%s, --no-%s", row->flag, row->flag + 2);
            printf("  %-46s %s [%s]\n", left, row->help, row->u_def != 0 ? "on" : "off");
            break;
        case KIND_ONLY:
            snprintf(left, sizeof left, "%s %s", row->flag, row->text);
            printf("  %-46s accepted: %s\n", left, row->help);
            break;
        }
    }
}

void config_group_hash(const lk_config_t *c, char out[33])
{
    char text[4096];
    int n =
        snprintf(text, sizeof text, "%s|%llu|%d|%llu|%llu|%s|%s|%llu|%s|%s|%llu|%s", c->model,
                 (unsigned long long)c->data_parallel_size, c->enable_expert_parallel,
                 (unsigned long long)c->max_model_len, (unsigned long long)c->block_size, c->dtype,
                 c->load_format, (unsigned long long)c->seed, c->device, c->weight_swap,
                 (unsigned long long)c->dp_sync_interval, c->weight_transfer_config);
    CHECK(n > 0);
    lk_hash128_t h = lk_hash128(text, LK_MIN((size_t)n, sizeof text - 1), 0);
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)h.hi, (unsigned long long)h.lo);
}

void config_init_log(const lk_config_t *config, const char *who)
{
    static const char *const names[] = {"debug", "info", "warning", "error"};
    lk_log_level_t level = LK_LOG_INFO;
    for (size_t i = 0; i < LK_ARRAY_LEN(names); i++) {
        if (strcmp(config->log_level, names[i]) == 0) {
            level = (lk_log_level_t)i;
        }
    }
    lk_log_init(who, level, strcmp(config->log_format, "json") == 0 ? LK_LOG_JSON : LK_LOG_TEXT);
}
