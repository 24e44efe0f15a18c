/* The old design, with the pause state in the front end: the simulator has to find its deadlock. */
#include "base/log.h"
#include "tests/lib/test_main.h"
#include "tests/sim/batch.h"
#include "tests/sim/scene.h"

#include <jansson.h>
#include <string.h>

/* One rank in a forward pass, another one in the weight broadcast, each waiting for the other. */
static bool is_the_deadlock(const sim_result_t *r)
{
    return r->failed && strcmp(r->check, "liveness") == 0 &&
           strstr(r->text, "is in a forward pass and waits for rank") != NULL &&
           strstr(r->text, "sits in the weight broadcast and waits for rank") != NULL;
}

START_TEST(test_deadlock_is_found)
{
    size_t n = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        sim_config_t config = {.seed = seed, .max_events = 4000, .frontend_pause = true};
        sim_result_t r;
        sim_options_draw(&config.options, seed);
        sim_run(&config, &r);
        n += is_the_deadlock(&r);
    }
    ck_assert_uint_ge(n, 3);
}
END_TEST

/* The same script that the product passes (test_scenarios.c). */
START_TEST(test_named_deadlock)
{
    const sim_scenario_t *scenario = sim_scenario_find("dp2_deadlock");
    for (uint64_t seed = 1; seed <= 4; seed++) {
        sim_config_t config = {.seed = seed, .frontend_pause = true, .scenario = scenario};
        sim_result_t r;
        sim_scenario_options(scenario, &config.options);
        sim_run(&config, &r);
        ck_assert_msg(is_the_deadlock(&r), "seed %llu: %s: %s", (unsigned long long)seed, r.check,
                      r.text);
    }
}
END_TEST

Suite *test_suite(void)
{
    json_object_seed(1);
    lk_log_init("sim", LK_LOG_ERROR, LK_LOG_TEXT);
    Suite *s = suite_create("sim_frontend_pause");
    TCase *tc = tcase_create("deadlock");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_deadlock_is_found);
    tcase_add_test(tc, test_named_deadlock);
    suite_add_tcase(s, tc);
    return s;
}
