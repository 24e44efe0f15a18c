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

/* Who is late for the vote, or the step, that is out: "1, 3"; as many as there is room for. */
static void list_late(const engine_core_t *self, char *out, size_t room)
{
    const engine_host_t *host = &self->config.host;
    const allreduce_t *ar = &self->config.allreduce;
    out[0] = '\0';
    if (group_posted(self->group)) {
        ar->ops->missing(ar->ctx, out, room);
    } else if (host->step_waits_for != NULL) {
        host->step_waits_for(host->ctx, out, room);
    }
}

/* Warns once, then gives the peers up. */
static void check_watch(engine_core_t *self, watch_t *watch, const char *what, uint64_t number)
{
    char who[256];
    list_late(self, who, 2); /* asked in every turn of the loop: one is enough */
    if (who[0] == '\0') {
        engine_start_watch(self, watch);
        return;
    }
    uint64_t waited = engine_now(self) - watch->since_ns;
    if (waited < self->config.dead_after_ns || (watch->warned && waited < patience(self))) {
        return;
    }
    list_late(self, who, sizeof who);
    if (waited >= patience(self)) {
        lk_error_t err;
        lk_error_set(&err, LK_ERR_PEER, "rank %s took no part in %s %llu for %.1f s", who, what,
                     (unsigned long long)number, (double)waited / LK_SECOND_NS);
        engine_core_leave(self, atoi(who), err.text);
    } else {
        watch->warned = true;
        LK_WARN("engine %u waits for rank %s in %s %llu since %.1f s", self->config.rank, who, what,
                (unsigned long long)number, (double)waited / LK_SECOND_NS);
    }
}

void engine_check_watches(engine_core_t *self)
{
    if (group_posted(self->group)) {
        check_watch(self, &self->vote_watch, "round", group_round(self->group));
    } else if (self->step_posted) {
        check_watch(self, &self->step_watch, "step", self->steps);
    }
}
