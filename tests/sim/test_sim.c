#include "base/log.h"
#include "tests/lib/test_main.h"
#include "tests/sim/batch.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__
#define N_SEEDS 10
#else
#define N_SEEDS 40
#endif

/* Seeds that found something once; each with what it was. They keep their options for as long as
 * options.def keeps its order. */
static const uint64_t found[] = {
    3,  /* dense, 7 ranks: the coordinator spun, and ENGINE_HERE was lost, before INIT arrived */
    48, /* 32 slow steps between rounds: no pause within a deadline shorter than that */
    6324577404570, /* the simulator: what a stopped front end had not read came behind later
                      messages */
    53, /* a trainer dies in an update, another caller aborts it: a rank stays out of a transfer */
};

static void run(const uint64_t *seeds, size_t n, bool twice)
{
    sim_batch_t batch = {.config = {.max_events = 10000},
                         .seeds = (uint64_t *)(uintptr_t)seeds,
                         .n_seeds = n,
                         .jobs = 2,
                         .twice = twice,
                         .prefix = "# ",
                         .replay = "./run sim"};
    ck_assert_uint_eq(sim_batch_run(&batch), 0);
}

START_TEST(test_seeds)
{
    uint64_t seeds[N_SEEDS], first = test_seed("seeds") >> 16;
    for (size_t i = 0; i < N_SEEDS; i++) {
        seeds[i] = first + i;
    }
    run(seeds, N_SEEDS, false);
}
END_TEST

START_TEST(test_found_once)
{
    run(found, sizeof found / sizeof found[0], false);
}
END_TEST

START_TEST(test_a_seed_replays_exactly)
{
    uint64_t seeds[6], first = test_seed("seeds") >> 16;
    for (size_t i = 0; i < 6; i++) {
        seeds[i] = first + 1000 + i;
    }
    run(seeds, 6, true);
}
END_TEST

/* Whoever has to catch the canary does so, and nobody comes first. */
START_TEST(test_canary)
{
    sim_canary_t canary = (sim_canary_t)_i;
    size_t caught = 0;
    for (uint64_t seed = 1; seed <= 40 && caught < 2; seed++) {
        sim_config_t config = {.seed = seed, .max_events = 4000, .canary = canary};
        sim_result_t r, again;
        sim_options_draw(&config.options, seed);
        config.options.stop_every_ms = config.options.kill_every_ms = 0;
        config.options.torn_streams = 0;
        if (canary == SIM_CANARY_UNTOLD) {
            config.options.kill_every_ms = 50;
            config.options.removals = 100;
        }
        config.options.break_every_ms = canary == SIM_CANARY_UNNUMBERED ? 2 : 0;
        if (canary == SIM_CANARY_TORN_BROADCAST) { /* where there are some */
            config.options.backend = 2;
            config.options.nccl = config.options.trainers = 1;
        }
        sim_run(&config, &r);
        if (canary == SIM_CANARY_REAL_TIME) {
            sim_run(&config, &again);
            caught += r.trace != again.trace;
        } else if (r.failed) {
            ck_assert_msg(strcmp(r.check, sim_canary_checker(canary)) == 0,
                          "seed %llu, canary %s is caught by %s: %s", (unsigned long long)seed,
                          sim_canary_name(canary), r.check, r.text);
            caught++;
        }
    }
    ck_assert_msg(caught == 2, "canary %s lives", sim_canary_name(canary));
}
END_TEST

Suite *test_suite(void)
{
    json_object_seed(1);
    lk_log_init("sim", LK_LOG_ERROR, LK_LOG_TEXT);
    Suite *s = suite_create("sim");
    TCase *tc = tcase_create("seeds");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, test_seeds);
    tcase_add_test(tc, test_found_once);
    tcase_add_test(tc, test_a_seed_replays_exactly);
    tcase_add_loop_test(tc, test_canary, SIM_CANARY_NONE + 1, SIM_CANARY_COUNT);
    suite_add_tcase(s, tc);
    return s;
}
