#include "tests/sim/canary.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *checker, *what;
} table[] = {{"", "", ""},
#define X(name, text, checker, what) {text, checker, what},
             SIM_CANARY_TABLE(X)
#undef X
};

const char *sim_canary_name(sim_canary_t canary)
{
    return table[canary].name;
}

const char *sim_canary_checker(sim_canary_t canary)
{
    return table[canary].checker;
}

sim_canary_t sim_canary_find(const char *name)
{
    for (int i = 1; i < SIM_CANARY_COUNT; i++) {
        if (strcmp(table[i].name, name) == 0) {
            return (sim_canary_t)i;
        }
    }
    return SIM_CANARY_NONE;
}

void sim_canary_list(char *out, size_t room)
{
    size_t n = 0;
    for (int i = 1; i < SIM_CANARY_COUNT && n < room; i++) {
        n += (size_t)snprintf(out + n, room - n, "%s: %s (%s)\n", table[i].name, table[i].what,
                              table[i].checker);
    }
}
