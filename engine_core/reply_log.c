#include "engine_core/reply_log.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    msg_done_t done; /* its strings are owned by the two below */
    char *text, *body;
} reply_t;

typedef struct {
    reply_t replies[REPLY_LOG_DEPTH];
    uint64_t n; /* ever added */
} ring_t;

struct reply_log {
    uint32_t n_frontends;
    ring_t rings[];
};

reply_log_t *reply_log_new(uint32_t n_frontends)
{
    reply_log_t *self = calloc(1, sizeof *self + n_frontends * sizeof self->rings[0]);
    if (self != NULL) {
        self->n_frontends = n_frontends;
    }
    return self;
}

void reply_log_destroy(reply_log_t **self_p)
{
    if (*self_p == NULL) {
        return;
    }
    for (uint32_t f = 0; f < (*self_p)->n_frontends; f++) {
        for (size_t i = 0; i < REPLY_LOG_DEPTH; i++) {
            free((*self_p)->rings[f].replies[i].text);
            free((*self_p)->rings[f].replies[i].body);
        }
    }
    free(*self_p);
    *self_p = NULL;
}

static char *copied(msg_str_t s)
{
    char *out = strdup(msg_cstr(s));
    CHECKF(out != NULL, "out of memory");
    return out;
}

void reply_log_add(reply_log_t *self, uint32_t frontend, const msg_done_t *done)
{
    CHECK(frontend < self->n_frontends);
    ring_t *ring = &self->rings[frontend];
    reply_t *reply = &ring->replies[ring->n++ % REPLY_LOG_DEPTH];
    free(reply->text);
    free(reply->body);
    *reply = (reply_t){.done = *done, .text = copied(done->text), .body = copied(done->body)};
    reply->done.text = msg_str(reply->text);
    reply->done.body = msg_str(reply->body);
}

const msg_done_t *reply_log_find(const reply_log_t *self, uint32_t frontend, uint64_t generation,
                                 uint64_t number)
{
    CHECK(frontend < self->n_frontends);
    const ring_t *ring = &self->rings[frontend];
    for (uint64_t i = 0; i < LK_MIN(ring->n, REPLY_LOG_DEPTH); i++) {
        const msg_done_t *done = &ring->replies[i].done;
        if (done->generation == generation && done->number == number) {
            return done;
        }
    }
    return NULL;
}
