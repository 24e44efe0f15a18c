#include "examples/demo/demo_trainer.h"
#include "base/check.h"
#include "transfer/trainer/lockstep_trainer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_RANKS 256

typedef struct {
    lst_t *lst;
    const demo_weights_t *weights;
    lst_tensor_t *tensors;
    size_t n;
    bool pauses;
    int report_fd;
} trainer_t;

/* Tells the demo why it ends. Returns the exit status. */
static int fail(const trainer_t *t, uint64_t set, const char *what, const char *text)
{
    update_report_t report = {.set = set};
    snprintf(report.error, sizeof report.error, "%s: %s", what, text);
    if (write(t->report_fd, &report, sizeof report) != (ssize_t)sizeof report) {
        fprintf(stderr, "demo trainer: %s\n", report.error);
    }
    return 1;
}

static void describe_tensors(trainer_t *t)
{
    const tensor_desc_t *descs = demo_weights_descs(t->weights);
    t->n = demo_weights_count(t->weights);
    t->tensors = calloc(t->n, sizeof *t->tensors);
    CHECK(t->tensors != NULL);
    for (size_t i = 0; i < t->n; i++) {
        uint64_t bytes;
        CHECK(tensor_desc_bytes(&descs[i], &bytes));
        t->tensors[i] =
            (lst_tensor_t){.name = descs[i].name, .dtype = "bfloat16", .ndim = descs[i].ndim};
        memcpy(t->tensors[i].shape, descs[i].shape, sizeof t->tensors[i].shape);
        t->tensors[i].data = malloc(bytes);
        CHECK(t->tensors[i].data != NULL);
    }
}

/* Every rank holds version and digest of what was sent. */
static lst_status_t check_ranks(trainer_t *t, const char *version, update_report_t *report)
{
    lst_rank_info_t ranks[MAX_RANKS];
    size_t n;
    char own[33];
    lst_status_t status = lst_digest(t->lst, t->tensors, t->n, own);
    if (status == LST_OK) {
        status = lst_weight_info(t->lst, ranks, MAX_RANKS, &n);
    }
    if (status != LST_OK) {
        return status;
    }
    report->ranks = (uint32_t)n;
    report->digests_equal = n > 0;
    for (size_t i = 0; i < n && i < MAX_RANKS; i++) {
        report->digests_equal &=
            strcmp(ranks[i].digest, own) == 0 && strcmp(ranks[i].version, version) == 0;
    }
    snprintf(report->digest, sizeof report->digest, "%s", own);
    return LST_OK;
}

static int push(trainer_t *t, uint64_t set)
{
    lk_error_t err = LK_ERROR_INIT;
    for (size_t i = 0; i < t->n; i++) { /* the "training step" */
        if (demo_weights_tensor(t->weights, i, set, (void *)t->tensors[i].data, &err) != LK_OK) {
            return fail(t, set, "generating", err.text);
        }
    }
    update_report_t report = {.set = set, .clear_cache = set % 2 == 1};
    char version[32];
    snprintf(version, sizeof version, "set-%llu", (unsigned long long)set);
    lst_update_options_t packed = {.packed = true};
    static const char *const steps[] = {"pause",          "start_weight_update",
                                        "update_weights", "finish_weight_update",
                                        "weight_info",    "resume"};
    lst_status_t status = LST_OK;
    for (size_t step = 0; step < LK_ARRAY_LEN(steps); step++) {
        switch (step) {
        case 0:
            status = t->pauses ? lst_pause(t->lst, "keep", report.clear_cache) : LST_OK;
            break;
        case 1:
            status = lst_start(t->lst);
            break;
        case 2:
            status = lst_update(t->lst, t->tensors, t->n, &packed);
            break;
        case 3:
            status = lst_finish(t->lst, version);
            break;
        case 4:
            status = check_ranks(t, version, &report);
            break;
        default:
            status = t->pauses ? lst_resume(t->lst) : LST_OK;
        }
        if (status != LST_OK) {
            return fail(t, set, steps[step], lst_last_error(t->lst));
        }
    }
    lst_stats_t stats;
    lst_stats(t->lst, &stats);
    report.bytes = demo_weights_bytes(t->weights);
    report.transfer_s = stats.last_transfer_s;
    report.pause_s = t->pauses ? stats.last_pause_window_s : 0;
    return write(t->report_fd, &report, sizeof report) == (ssize_t)sizeof report ? 0 : 1;
}

int demo_trainer_run(const char *endpoint, const demo_weights_t *weights, uint64_t n_sets,
                     bool pauses, int go_fd, int report_fd)
{
    trainer_t t = {.weights = weights, .pauses = pauses, .report_fd = report_fd};
    char text[512];
    lst_options_t options = {.endpoint = endpoint};
    if (lst_open(&options, &t.lst, text, sizeof text) != LST_OK) {
        return fail(&t, 0, "connecting", text);
    }
    describe_tensors(&t);
    int rc = 0;
    if (lst_init_tcp(t.lst, NULL) != LST_OK) {
        rc = fail(&t, 0, "init_weight_transfer_engine", lst_last_error(t.lst));
    }
    for (uint64_t set = 1; set <= n_sets && rc == 0; set++) {
        char byte;
        if (read(go_fd, &byte, 1) != 1) {
            break; /* the demo is gone */
        }
        rc = push(&t, set);
    }
    for (size_t i = 0; i < t.n; i++) {
        free((void *)t.tensors[i].data);
    }
    free(t.tensors);
    lst_close(&t.lst);
    return rc;
}
