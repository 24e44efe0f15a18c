/* GET /metrics: what is counted, and that the text is what Prometheus reads. */
#include "base/check.h"
#include "tests/unit/api_frontend/completion_rig.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fake_client_t reply;

static const char *get_metrics(void)
{
    fc_fini(&reply);
    fc_call(&reply, &api, "GET", "/metrics", NULL);
    ck_assert_int_eq(reply.status, 200);
    return reply.text;
}

/* The value of the sample that starts with `sample`, labels included. */
static double value(const char *sample)
{
    const char *text = get_metrics(), *p = text;
    size_t n = strlen(sample);
    while ((p = strstr(p, sample)) != NULL && (p != text && p[-1] != '\n')) {
        p += n;
    }
    ck_assert_msg(p != NULL && p[n] == ' ', "no sample %s in\n%s", sample, text);
    return strtod(p + n, NULL);
}

#define OF_FRONTEND "{model_name=\"m\",frontend=\"0\"}"
#define FINISHED(reason)                                                                           \
    "vllm:request_success_total{model_name=\"m\",frontend=\"0\",finished_reason=\"" reason "\"}"

static void report(msg_load_t *loads, size_t n)
{
    msg_t msg = {.type = MSG_STATS};
    msg.stats =
        (msg_stats_t){.serving = true, .group_epoch = 1, .max_model_len = 64, .vocab_size = 300};
    msg.stats.loads.items = loads;
    msg.stats.loads.count = n;
    engine_client_on_msg(g.client, &msg);
}

START_TEST(test_latencies)
{
    fake_client_t c;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1,2,3],\"stream\":true}");
    sent_t s = take_add();
    ck_assert_double_eq(value("lockstep:open_requests" OF_FRONTEND), 1);
    ck_assert_double_eq(value("lockstep:open_completions" OF_FRONTEND), 1);
    fg_advance(&g, 30 * LK_MS_NS);
    answer(s, &(out_t){.text = "a", .queue_ns = 4 * LK_MS_NS, .prefill_ns = 11 * LK_MS_NS});
    fg_advance(&g, 80 * LK_MS_NS);
    answer(s, &(out_t){.text = "bcde"}); /* 20 ms each */
    fg_advance(&g, 890 * LK_MS_NS);
    answer(s, &(out_t){.text = "", .finish = FINISH_LENGTH});
    ck_assert_double_eq(value("vllm:time_to_first_token_seconds_count" OF_FRONTEND), 1);
    ck_assert_double_eq_tol(value("vllm:time_to_first_token_seconds_sum" OF_FRONTEND), 0.03, 1e-9);
    ck_assert_double_eq(value("vllm:time_to_first_token_seconds_bucket{model_name=\"m\","
                              "frontend=\"0\",le=\"0.02\"}"),
                        0);
    ck_assert_double_eq(value("vllm:time_to_first_token_seconds_bucket{model_name=\"m\","
                              "frontend=\"0\",le=\"0.04\"}"),
                        1);
    ck_assert_double_eq(value("vllm:inter_token_latency_seconds_count" OF_FRONTEND), 4);
    ck_assert_double_eq_tol(value("vllm:inter_token_latency_seconds_sum" OF_FRONTEND), 0.08, 1e-9);
    ck_assert_double_eq_tol(value("vllm:e2e_request_latency_seconds_sum" OF_FRONTEND), 1.0, 1e-9);
    static const struct {
        const char *name;
        double sum;
    } sums[] = {
        {"vllm:request_queue_time_seconds_sum" OF_FRONTEND, 0.004},
        {"vllm:request_prefill_time_seconds_sum" OF_FRONTEND, 0.011},
        {"vllm:request_decode_time_seconds_sum" OF_FRONTEND, 0.08},
        {"vllm:request_inference_time_seconds_sum" OF_FRONTEND, 0.091},
        {"vllm:request_time_per_output_token_seconds_sum" OF_FRONTEND, 0.02},
        {"vllm:request_params_n_sum" OF_FRONTEND, 1},
        {"vllm:request_params_max_tokens_sum" OF_FRONTEND, 16},
        {"vllm:request_max_num_generation_tokens_sum" OF_FRONTEND, 5},
        {"vllm:request_prefill_kv_computed_tokens_sum" OF_FRONTEND, 1},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(sums); i++) {
        ck_assert_msg(fabs(value(sums[i].name) - sums[i].sum) < 1e-9, "%s is %g", sums[i].name,
                      value(sums[i].name));
    }
    ck_assert_double_eq(value("vllm:request_decode_time_seconds_count" OF_FRONTEND), 1);
    ck_assert_double_eq(value("vllm:request_prompt_tokens_sum" OF_FRONTEND), 3);
    ck_assert_double_eq(value("vllm:request_generation_tokens_sum" OF_FRONTEND), 5);
    ck_assert_double_eq(value(FINISHED("length")), 1);
    ck_assert_double_eq(value("lockstep:open_requests" OF_FRONTEND), 0);
    fc_fini(&c);
}
END_TEST

/* Every way a request can end is counted once. */
START_TEST(test_ends)
{
    fake_client_t c, d;
    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":0}");
    fc_fini(&c);
    ck_assert_double_eq(value("lockstep:refused_requests_total" OF_FRONTEND), 1);
    ck_assert_double_eq(value(FINISHED("error")), 0);

    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":2,\"stop\":\"lo\"}");
    sent_t s = take_add();
    answer(s, &(out_t){.text = "hello"});
    ck_assert_double_eq(value(FINISHED("stop")), 1);
    fc_call(&d, &api, "POST", "/abort_requests", "{}");
    ck_assert_double_eq(value(FINISHED("abort")), 1);
    /* once for a prompt, when all of its choices have ended; no times of what never ran */
    ck_assert_double_eq(value("vllm:request_params_n_sum" OF_FRONTEND), 2);
    ck_assert_double_eq(value("vllm:request_params_n_count" OF_FRONTEND), 1);
    ck_assert_double_eq(value("vllm:request_max_num_generation_tokens_sum" OF_FRONTEND), 5);
    ck_assert_double_eq(value("vllm:request_queue_time_seconds_count" OF_FRONTEND), 1);
    ck_assert_double_eq(value("vllm:request_decode_time_seconds_count" OF_FRONTEND), 1);
    fc_fini(&c);
    fc_fini(&d);
    (void)take_add();

    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"stream\":true}");
    (void)take_add();
    fc_gone(&c);
    fc_fini(&c);
    ck_assert_double_eq(value(FINISHED("abort")), 2);

    fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1],\"n\":2}");
    s = take_add();
    msg_t msg = {.type = MSG_ENGINE_DEAD};
    msg.engine_dead = (msg_engine_dead_t){s.rank, msg_str("gone")};
    engine_client_on_msg(g.client, &msg);
    fc_fini(&c);
    ck_assert_double_eq(value(FINISHED("error")), 2); /* both choices of the call */
    ck_assert_double_eq(value("vllm:e2e_request_latency_seconds_count" OF_FRONTEND), 5);
    char up[96];
    snprintf(up, sizeof up, "lockstep:engine_up{model_name=\"m\",engine=\"%u\"}", s.rank);
    ck_assert_double_eq(value(up), 0);
}
END_TEST

START_TEST(test_engines)
{
    ck_assert_ptr_null(strstr(get_metrics(), "vllm:num_requests_running{")); /* nothing is known */
    msg_load_t loads[] = {
        {.rank = 0, .running = 3, .waiting = 2, .kv_usage = 0.25, .kv_blocks = 512},
        {.rank = 1,
         .running = 4,
         .waiting = 7,
         .paused = true,
         .gates = GATE_DIRTY,
         .weight_epoch = 5,
         .weight_version = msg_str("step \"7\"\\"),
         .votes = 11,
         .pauses = 2,
         .paused_ns = 1500 * LK_MS_NS,
         .last_pause_ns = 500 * LK_MS_NS,
         .shadow = true,
         .session_open = true,
         .receiving_done = 300,
         .receiving_total = 900,
         .updates = 6,
         .update_bytes = 1000000,
         .update_ns = LK_SECOND_NS / 4,
         .preemptions = 8,
         .block_size = 16},
    };
    report(loads, 2);
    static const struct {
        const char *sample;
        double value;
    } want[] = {
        {"vllm:num_requests_running{model_name=\"m\",engine=\"0\"}", 3},
        {"vllm:num_requests_running{model_name=\"m\",engine=\"1\"}", 4},
        {"vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"}", 0.25},
        {"vllm:num_preemptions_total{model_name=\"m\",engine=\"1\"}", 8},
        {"vllm:num_requests_waiting_by_reason{model_name=\"m\",engine=\"0\",reason=\"capacity\"}",
         2},
        {"vllm:num_requests_waiting_by_reason{model_name=\"m\",engine=\"1\",reason=\"capacity\"}",
         0},
        {"vllm:num_requests_waiting_by_reason{model_name=\"m\",engine=\"1\",reason=\"deferred\"}",
         7},
        {"lockstep:votes_total{model_name=\"m\",engine=\"1\"}", 11},
        {"lockstep:paused{model_name=\"m\",engine=\"1\"}", 1},
        {"lockstep:pauses_total{model_name=\"m\",engine=\"1\"}", 2},
        {"lockstep:paused_seconds_total{model_name=\"m\",engine=\"1\"}", 1.5},
        {"lockstep:last_pause_seconds{model_name=\"m\",engine=\"1\"}", 0.5},
        {"lockstep:weight_epoch{model_name=\"m\",engine=\"1\"}", 5},
        {"lockstep:gate{model_name=\"m\",engine=\"1\",gate=\"dirty\"}", 1},
        {"lockstep:gate{model_name=\"m\",engine=\"1\",gate=\"session\"}", 0},
        {"lockstep:weight_swap_info{model_name=\"m\",engine=\"0\",mode=\"inplace\"}", 1},
        {"lockstep:weight_swap_info{model_name=\"m\",engine=\"1\",mode=\"shadow\"}", 1},
        {"lockstep:weight_session_open{model_name=\"m\",engine=\"1\"}", 1},
        {"lockstep:weight_update_bytes_done{model_name=\"m\",engine=\"1\"}", 300},
        {"lockstep:weight_update_bytes_expected{model_name=\"m\",engine=\"1\"}", 900},
        {"lockstep:weight_updates_total{model_name=\"m\",engine=\"1\"}", 6},
        {"lockstep:weight_update_bytes_total{model_name=\"m\",engine=\"1\"}", 1000000},
        {"lockstep:weight_update_seconds_total{model_name=\"m\",engine=\"1\"}", 0.25},
        {"vllm:engine_sleep_state{model_name=\"m\",engine=\"0\",sleep_state=\"awake\"}", 1},
        {"lockstep:weight_version_info{model_name=\"m\",engine=\"1\",version=\"step "
         "\\\"7\\\"\\\\\"}",
         1},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(want); i++) {
        ck_assert_msg(value(want[i].sample) == want[i].value, "%s is %g", want[i].sample,
                      value(want[i].sample));
    }
    ck_assert_ptr_nonnull(strstr(get_metrics(),
                                 "vllm:cache_config_info{model_name=\"m\",engine=\"0\","
                                 "block_size=\"0\",num_gpu_blocks=\"512\","));
}
END_TEST

/* ---- the format ---- */

static void busy_state(void)
{
    msg_load_t loads[2] = {{.rank = 0, .kv_usage = 1.0 / 3},
                           {.rank = 1, .weight_version = msg_str("a\nb")}};
    report(loads, 2);
    for (int i = 0; i < 20; i++) {
        fake_client_t c;
        fc_call(&c, &api, "POST", "/v1/completions", "{\"prompt\":[1,2,3]}");
        sent_t s = take_add();
        fg_advance(&g, (uint64_t)1 << (20 + i));
        answer(s, &(out_t){.text = "abc"});
        fg_advance(&g, (uint64_t)1 << (21 + i));
        answer(s, &(out_t){.text = "de", .finish = FINISH_LENGTH});
        fc_fini(&c);
    }
}

/* Each sample belongs to the family whose HELP and TYPE came last, once; buckets only grow and end
 * with the count. */
START_TEST(test_format)
{
    config.served_model_name = "odd \"model\"\\";
    snprintf(api.model, sizeof api.model, "%s", config.served_model_name);
    busy_state();
    char family[128] = "", *save = NULL, *text = strdup(get_metrics());
    ck_assert_int_eq(text[strlen(text) - 1], '\n');
    double bucket = 0;
    size_t samples = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[128];
        if (sscanf(line, "# HELP %127s", name) == 1) {
            ck_assert_msg(strstr(save, name) != NULL && strlen(line) > strlen(name) + 9, "%s",
                          line);
            snprintf(family, sizeof family, "%s", name);
            bucket = 0;
            continue;
        }
        if (sscanf(line, "# TYPE %127s", name) == 1) {
            ck_assert_str_eq(name, family);
            continue;
        }
        ck_assert_msg(strncmp(line, family, strlen(family)) == 0, "%s under %s", line, family);
        const char *labels = strchr(line, '{'), *end = strrchr(line, '}');
        ck_assert_msg(labels != NULL && end != NULL && end[1] == ' ', "%s", line);
        char *tail;
        double x = strtod(end + 2, &tail);
        ck_assert_msg(*tail == '\0' && tail != end + 2 && x >= 0, "%s", line);
        if (strstr(line, "_bucket{") != NULL) {
            ck_assert_msg(x >= bucket, "%s", line);
            bucket = x;
        } else if (strstr(line, "_count{") != NULL) {
            ck_assert_msg(x == bucket, "%s", line);
        }
        samples++;
    }
    ck_assert_uint_gt(samples, 150);
    free(text);
}
END_TEST

/* Prometheus' own check. It finds fault with the colon in vLLM's names, and with nothing else. */
START_TEST(test_promtool)
{
    if (system("command -v promtool >/dev/null 2>&1") != 0) {
        printf("# skipped: promtool is not installed (Debian package prometheus)\n");
        return;
    }
    busy_state();
    char in[512], command[1200];
    snprintf(in, sizeof in, "%s/metrics", test_tmpdir());
    FILE *f = fopen(in, "w");
    ck_assert_ptr_nonnull(f);
    fputs(get_metrics(), f);
    fclose(f);
    snprintf(command, sizeof command, "promtool check metrics <%s 2>&1", in);
    f = popen(command, "r");
    ck_assert_ptr_nonnull(f);
    char line[1024];
    while (fgets(line, sizeof line, f) != NULL) {
        ck_assert_msg(strstr(line, "metric names should not contain ':'") != NULL, "promtool: %s",
                      line);
    }
    int status = pclose(f); /* 0, or 3: remarks, which were read above */
    ck_assert_msg(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3),
                  "promtool ended with %d", status);
}
END_TEST

static void drop_reply(void)
{
    fc_fini(&reply);
    memset(&reply, 0, sizeof reply);
}

Suite *test_suite(void)
{
    Suite *suite = suite_create("metrics");
    TCase *tc = tcase_create("metrics");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_checked_fixture(tc, NULL, drop_reply);
    tcase_add_test(tc, test_latencies);
    tcase_add_test(tc, test_ends);
    tcase_add_test(tc, test_engines);
    tcase_add_test(tc, test_format);
    tcase_add_test(tc, test_promtool);
    suite_add_tcase(suite, tc);
    return suite;
}
