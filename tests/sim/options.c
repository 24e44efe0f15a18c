#include "tests/sim/options.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t below(lk_prng_t *p, uint64_t bound)
{
    return lk_prng_below(p, bound);
}

static uint64_t between(lk_prng_t *p, uint64_t least, uint64_t most)
{
    return least + lk_prng_below(p, most - least + 1);
}

static uint64_t chance(lk_prng_t *p, uint64_t percent)
{
    return lk_prng_below(p, 100) < percent;
}

static uint64_t pick(lk_prng_t *p, const uint64_t *values, size_t n)
{
    return values[lk_prng_below(p, n)];
}

static uint64_t at_least(uint64_t value, uint64_t least)
{
    return LK_MAX(value, least);
}

static uint64_t at_most(uint64_t value, uint64_t most)
{
    return LK_MIN(value, most);
}

void sim_options_draw(sim_options_t *self, uint64_t seed)
{
    lk_prng_t prng, *p = &prng;
    sim_options_t *o = self;
    lk_prng_seed(&prng, lk_mix64(seed ^ 0x6f7074696f6e73ull));
#define OPTION(name, least, most, draw) o->name = (draw);
#include "tests/sim/options.def"
#undef OPTION
}

static const struct {
    const char *name;
    size_t offset;
    uint64_t least, most;
} table[] = {
#define OPTION(name, least, most, draw) {#name, offsetof(sim_options_t, name), least, most},
#include "tests/sim/options.def"
#undef OPTION
};

lk_status_t sim_options_set(sim_options_t *self, const char *text, lk_error_t *err)
{
    const char *eq = strchr(text, '=');
    for (size_t i = 0; eq != NULL && i < LK_ARRAY_LEN(table); i++) {
        if (strlen(table[i].name) != (size_t)(eq - text) ||
            strncmp(table[i].name, text, (size_t)(eq - text)) != 0) {
            continue;
        }
        char *end;
        uint64_t value = strtoull(eq + 1, &end, 0);
        if (eq[1] == '\0' || *end != '\0' || value < table[i].least || value > table[i].most) {
            return lk_error_set(err, LK_ERR_INVALID, "%s: %llu to %llu are possible", text,
                                (unsigned long long)table[i].least,
                                (unsigned long long)table[i].most);
        }
        memcpy((char *)self + table[i].offset, &value, sizeof value);
        return LK_OK;
    }
    return lk_error_set(err, LK_ERR_INVALID, "%s: no such option (tests/sim/options.def)", text);
}

void sim_options_text(const sim_options_t *self, char *out, size_t room)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < LK_ARRAY_LEN(table) && n < room; i++) {
        uint64_t value;
        memcpy(&value, (const char *)self + table[i].offset, sizeof value);
        n += (size_t)snprintf(out + n, room - n, "%s%s=%llu", i > 0 ? " " : "", table[i].name,
                              (unsigned long long)value);
    }
}
