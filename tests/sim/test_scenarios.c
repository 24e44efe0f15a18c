/* The scenarios of scenarios.def, each on a few seeds (other latencies), with and without the
 * doorbell, in place and with a shadow set, unless it says which. */
#include "base/log.h"
#include "tests/lib/test_main.h"
#include "tests/sim/scene.h"

#include <jansson.h>
#include <string.h>

#define N_SEEDS 4

static void vary(const sim_scenario_t *scenario, const char *option, uint64_t *value, uint64_t to)
{
    if (strstr(scenario->sets, option) == NULL) {
        *value = to;
    }
}

static void run(const sim_scenario_t *scenario, uint64_t seed)
{
    sim_config_t config = {.seed = seed, .scenario = scenario};
    sim_result_t r;
    sim_scenario_options(scenario, &config.options);
    vary(scenario, "doorbell=", &config.options.doorbell, seed % 2);
    vary(scenario, "swap=", &config.options.swap, seed / 2 % 2);
    sim_run(&config, &r);
    if (scenario->fails[0] != '\0') {
        ck_assert_msg(r.failed && strstr(r.text, scenario->fails) != NULL,
                      "%s (%s), seed %llu: not \"%s\" but: %s", scenario->name, scenario->holds,
                      (unsigned long long)seed, scenario->fails, r.text);
    } else {
        ck_assert_msg(!r.failed, "%s (%s), seed %llu, doorbell %d, swap %d: %s: %s", scenario->name,
                      scenario->holds, (unsigned long long)seed, (int)config.options.doorbell,
                      (int)config.options.swap, r.check, r.text);
    }
}

START_TEST(test_scenario)
{
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        run(&sim_scenarios[_i], seed);
    }
}
END_TEST

Suite *test_suite(void)
{
    json_object_seed(1);
    lk_log_init("sim", LK_LOG_ERROR, LK_LOG_TEXT);
    Suite *s = suite_create("sim_scenarios");
    TCase *tc = tcase_create("scenarios");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_scenario, 0, (int)sim_n_scenarios);
    suite_add_tcase(s, tc);
    return s;
}
