/* options.h: the options of a run (options.def), drawn from its seed. */
#ifndef LK_TESTS_SIM_OPTIONS_H
#define LK_TESTS_SIM_OPTIONS_H

#include "base/prng.h"
#include "base/status.h"

typedef struct {
#define OPTION(name, least, most, draw) uint64_t name;
#include "tests/sim/options.def"
#undef OPTION
} sim_options_t;

void sim_options_draw(sim_options_t *self, uint64_t seed);
/* "name=value". */
LK_MUST_USE lk_status_t sim_options_set(sim_options_t *self, const char *text, lk_error_t *err);
/* "ranks=2 frontends=1 ..." into out. */
void sim_options_text(const sim_options_t *self, char *out, size_t room);

#endif
