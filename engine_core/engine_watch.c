/* engine_watch.c: how long a rank waits for its peers, and what it says meanwhile. */
#include "base/log.h"
#include "engine_core/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>

/* A rank whose transfer is done waits for the others' in the outcome round; they have their own
 * no-progress deadline, so this limit is for a rank that neither moves nor fails. */
#define OWED_PATIENCE 20

void engine_start_watch(engine_core_t *self, watch_t *watch)
{
    *watch = (watch_t){.since_ns = engine_now(self)};
}

static uint64_t patience(const engine_core_t *self)
{
    uint64_t limit = 2 * self->config.control_timeout_ns;
    return group_owes(self->group) ? limit + OWED_PATIENCE * self->config.transfer_timeout_ns
                                   : limit;
}

/* Warns once, then gives the peers up. `who`: "1, 3", or "" when nobody is late (any more). */
static void check_watch(engine_core_t *self, watch_t *watch, const char *what, const char *who)
{
    if (who[0] == '\0') {
        engine_start_watch(self, watch);
        return;
    }
    uint64_t waited = engine_now(self) - watch->since_ns;
    if (waited >= patience(self)) {
        lk_error_t err;
        lk_error_set(&err, LK_ERR_PEER, "rank %s took no part in %s for %.1f s", who, what,
                     (double)waited / LK_SECOND_NS);
        engine_core_leave(self, atoi(who), err.text);
    } else if (waited >= self->config.dead_after_ns && !watch->warned) {
        watch->warned = true;
        LK_WARN("engine %u waits for rank %s in %s since %.1f s", self->config.rank, who, what,
                (double)waited / LK_SECOND_NS);
    }
}

void engine_check_watches(engine_core_t *self)
{
    char who[256] = "", what[64];
    const allreduce_t *ar = &self->config.allreduce;
    if (group_posted(self->group)) {
        ar->ops->missing(ar->ctx, who, sizeof who);
        snprintf(what, sizeof what, "round %llu", (unsigned long long)group_round(self->group));
        check_watch(self, &self->vote_watch, what, who);
    } else if (self->step_posted && self->config.host.step_waits_for != NULL) {
        self->config.host.step_waits_for(self->config.host.ctx, who, sizeof who);
        snprintf(what, sizeof what, "step %llu", (unsigned long long)self->steps);
        check_watch(self, &self->step_watch, what, who);
    }
}
