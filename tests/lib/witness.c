#include "tests/lib/witness.h"
#include "base/check.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *read_digests(const cluster_t *c)
{
    json_t *info = cluster_call(c, "GET", "/weight_info", NULL, 200, NULL), *list = json_array();
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(info, "ranks"), i, row)
    {
        json_array_append(list, json_object_get(row, "digest"));
    }
    ck_assert_uint_gt(json_array_size(list), 0);
    json_decref(info);
    return list;
}

static void read_seeded(const cluster_t *c, tokens_t *out)
{
    json_t *reply = complete(c, "{\"prompt\":\"undisturbed\",\"max_tokens\":16,\"seed\":5,"
                                "\"logprobs\":0,\"return_token_ids\":true,"
                                "\"return_tokens_as_token_ids\":true}");
    take_tokens(choice(reply, 0), out);
    json_decref(reply);
}

static uint64_t peak_of(pid_t pid)
{
    char path[64], line[256];
    unsigned long long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    ck_assert_msg(f != NULL, "process %d is gone", (int)pid);
    while (fgets(line, sizeof line, f) != NULL) {
        (void)sscanf(line, "VmHWM: %llu", &kib);
    }
    fclose(f);
    return (uint64_t)kib << 10;
}

void witness_take(witness_t *self, const cluster_t *c, uint64_t max_growth)
{
    read_seeded(c, &self->seeded);
    self->digests = read_digests(c);
    self->n_pids = cluster_pids(c, "lockstep-", self->pids, WITNESS_MAX_PIDS);
    ck_assert_uint_le(self->n_pids, WITNESS_MAX_PIDS);
    for (size_t i = 0; i < self->n_pids; i++) {
        self->peak[i] = peak_of(self->pids[i]);
    }
    self->max_growth = max_growth;
}

void witness_check(const witness_t *self, const cluster_t *c)
{
    static tokens_t now;
    read_seeded(c, &now);
    check_same_tokens(&self->seeded, &now, "a seeded completion");
    json_t *digests = read_digests(c);
    ck_assert_msg(json_equal(digests, self->digests), "the weights' digests have changed");
    json_decref(digests);
    pid_t pids[WITNESS_MAX_PIDS];
    ck_assert_uint_eq(cluster_pids(c, "lockstep-", pids, WITNESS_MAX_PIDS), self->n_pids);
    for (size_t i = 0; i < self->n_pids; i++) {
        ck_assert_int_eq(pids[i], self->pids[i]);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* it keeps what was freed */
        uint64_t growth = peak_of(pids[i]) - self->peak[i];
        ck_assert_msg(growth <= self->max_growth, "process %d grew by %llu MiB", (int)pids[i],
                      (unsigned long long)growth >> 20);
#endif
    }
}

void witness_fini(witness_t *self)
{
    json_decref(self->digests);
    self->digests = NULL;
}
