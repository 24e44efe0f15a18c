#include "base/check.h"
#include "coordinator/coordinator.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <string.h>

/* A cluster of two engines and one front end on virtual time; what the coordinator sends is kept.
 */
typedef struct {
    coordinator_t *coordinator;
    uint64_t now_ns;
    lk_env_t env;
    int inits, refusals, stats, starts;
    char refusal[LK_ERROR_TEXT_MAX];
    uint64_t start_round;
    char mesh1[64];
    bool serving, run, paused;
    size_t n_dead;
    char dead[128];
    uint64_t max_model_len, num_blocks, waiting1;
} world_t;

static uint64_t now(void *ctx)
{
    return ((world_t *)ctx)->now_ns;
}

static void on_reply(void *ctx, uint32_t role, uint32_t rank, const msg_t *msg)
{
    world_t *w = ctx;
    ck_assert_int_eq(msg->type, MSG_INIT);
    if (msg->init.error.len > 0) {
        w->refusals++;
        snprintf(w->refusal, sizeof w->refusal, "%s", msg_cstr(msg->init.error));
        return;
    }
    w->inits++;
    ck_assert_uint_eq(msg->init.mesh.count, 2);
    snprintf(w->mesh1, sizeof w->mesh1, "%s", msg_cstr(msg->init.mesh.items[1].text));
}

static void on_stats(void *ctx, const msg_t *msg)
{
    world_t *w = ctx;
    w->stats++;
    w->serving = msg->stats.serving;
    w->run = msg->stats.run;
    w->paused = msg->stats.paused;
    w->n_dead = msg->stats.dead.count;
    w->max_model_len = msg->stats.max_model_len;
    w->num_blocks = msg->stats.num_blocks;
    w->waiting1 = msg->stats.loads.items[1].waiting;
    snprintf(w->dead, sizeof w->dead, "%s",
             w->n_dead > 0 ? msg_cstr(msg->stats.dead.items[0].text) : "");
}

static void on_wave(void *ctx, const msg_t *msg)
{
    world_t *w = ctx;
    w->starts++;
    w->start_round = msg->start_dp_wave.round;
}

static void world_init(world_t *w)
{
    *w = (world_t){.now_ns = 1};
    w->env = (lk_env_t){.ctx = w, .now_ns = now};
    coordinator_config_t config = {.dp_size = 2,
                                   .n_frontends = 1,
                                   .config_hash = "h",
                                   .events_address = "e",
                                   .stats_address = "s",
                                   .wave_address = "w",
                                   .handshake_timeout_ns = 10 * LK_SECOND_NS,
                                   .dead_after_ns = 5 * LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &w->env,
                                   .host = {w, on_reply, on_stats, on_wave}};
    w->coordinator = coordinator_new(&config);
    ck_assert_ptr_nonnull(w->coordinator);
}

static lk_status_t step(world_t *w, lk_error_t *err)
{
    lk_status_t status;
    uint64_t next = coordinator_step(w->coordinator, &status, err);
    ck_assert_uint_gt(next, w->now_ns);
    return status;
}

static msg_t from(msg_type_t type, uint32_t role, uint32_t rank)
{
    return (msg_t){.type = type, .sender_role = role, .sender_rank = rank, .generation = 1};
}

static void hello(world_t *w, uint32_t role, uint32_t rank, const char *hash)
{
    msg_t m = from(MSG_HELLO, role, rank);
    char mesh[16];
    snprintf(mesh, sizeof mesh, "mesh%u", rank);
    m.hello = (msg_hello_t){
        .role = role, .rank = rank, .config_hash = msg_str(hash), .mesh_address = msg_str(mesh)};
    coordinator_on_message(w->coordinator, &m);
}

static void ready(world_t *w, uint32_t role, uint32_t rank, const char *digest, const char *error)
{
    msg_t m = from(MSG_READY, role, rank);
    m.ready = (msg_ready_t){.role = role,
                            .rank = rank,
                            .num_blocks = 100,
                            .max_model_len = 512 + rank,
                            .vocab_size = 512,
                            .digest = msg_str(digest),
                            .error = msg_str(error)};
    coordinator_on_message(w->coordinator, &m);
}

static void heartbeat(world_t *w, uint32_t role, uint32_t rank)
{
    msg_t m = from(MSG_HEARTBEAT, role, rank);
    m.heartbeat = (msg_heartbeat_t){.role = role, .rank = rank};
    coordinator_on_message(w->coordinator, &m);
}

static void start_cluster(world_t *w)
{
    world_init(w);
    hello(w, MSG_ROLE_ENGINE, 0, "h");
    hello(w, MSG_ROLE_FRONTEND, 0, "h");
    ck_assert_int_eq(w->inits, 0);
    hello(w, MSG_ROLE_ENGINE, 1, "h");
    ck_assert_int_eq(w->inits, 3);
    ck_assert_str_eq(w->mesh1, "mesh1");
    ready(w, MSG_ROLE_FRONTEND, 0, "", NULL);
    ready(w, MSG_ROLE_ENGINE, 0, "d", NULL);
    ck_assert(!coordinator_serving(w->coordinator));
    ready(w, MSG_ROLE_ENGINE, 1, "d", NULL);
    ck_assert(coordinator_serving(w->coordinator));
    ck_assert_int_eq(step(w, NULL), LK_OK);
    ck_assert(w->serving);
    ck_assert_uint_eq(w->max_model_len, 512);
    ck_assert_uint_eq(w->num_blocks, 200);
}

START_TEST(handshake_ends_in_serving)
{
    world_t w;
    start_cluster(&w);
    coordinator_destroy(&w.coordinator);
    coordinator_destroy(&w.coordinator);
    coordinator_destroy(NULL);
}
END_TEST

START_TEST(strangers_are_refused_by_name)
{
    world_t w;
    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 2, "h");
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 2, but this cluster has 2 engines"));
    hello(&w, MSG_ROLE_ENGINE, 1, "other");
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 1 was started with other flags"));
    hello(&w, MSG_ROLE_TRAINER, 0, "h");
    ck_assert_int_eq(w.refusals, 3);
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    ck_assert_ptr_nonnull(strstr(w.refusal, "engine 1 has said HELLO already"));
    ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL); /* before its HELLO: dropped */
    ck_assert(!coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(handshake_deadline_names_who_is_late)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 0, "h");
    w.now_ns += 11 * LK_SECOND_NS;
    ck_assert_int_eq(step(&w, &err), LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "engine 1, front end 0 did not say HELLO"));
    coordinator_destroy(&w.coordinator);

    world_init(&w);
    hello(&w, MSG_ROLE_ENGINE, 0, "h");
    hello(&w, MSG_ROLE_ENGINE, 1, "h");
    hello(&w, MSG_ROLE_FRONTEND, 0, "h");
    ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL);
    w.now_ns += 11 * LK_SECOND_NS;
    ck_assert_int_eq(step(&w, &err), LK_ERR_TIMEOUT);
    ck_assert_ptr_nonnull(strstr(err.text, "engine 1, front end 0 did not finish loading"));
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(loads_of_a_starting_cluster_keep_nobody_busy)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w);
    w.now_ns = 3 * LK_SECOND_NS; /* nothing was ever published */
    msg_t m = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
    m.load_report.load = (msg_load_t){.rank = 1, .waiting = 2};
    coordinator_on_message(w.coordinator, &m);
    ck_assert_int_eq(step(&w, &err), LK_OK); /* says to come again later, not at once */
    ck_assert_int_eq(w.stats, 0);
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(failed_or_different_loads_stop_the_start)
{
    for (int different = 0; different < 2; different++) {
        world_t w;
        lk_error_t err = LK_ERROR_INIT;
        world_init(&w);
        hello(&w, MSG_ROLE_ENGINE, 0, "h");
        hello(&w, MSG_ROLE_ENGINE, 1, "h");
        hello(&w, MSG_ROLE_FRONTEND, 0, "h");
        ready(&w, MSG_ROLE_ENGINE, 0, "d", NULL);
        ready(&w, MSG_ROLE_ENGINE, 1, "e", different ? NULL : "no such file");
        ck_assert_int_lt(step(&w, &err), 0);
        ck_assert_ptr_nonnull(strstr(err.text, different ? "engine 1 loaded other weights"
                                                         : "engine 1 can not start: no such file"));
        ck_assert(!coordinator_serving(w.coordinator));
        coordinator_destroy(&w.coordinator);
    }
}
END_TEST

START_TEST(announce_and_first_req_become_invitations)
{
    world_t w;
    start_cluster(&w);
    msg_t a = from(MSG_ANNOUNCE, MSG_ROLE_ENGINE, 1);
    a.announce = (msg_announce_t){.rank = 1, .round = 7};
    coordinator_on_message(w.coordinator, &a);
    coordinator_on_message(w.coordinator, &a); /* repeated: harmless, answered again */
    ck_assert_int_eq(w.starts, 2);
    ck_assert_uint_eq(w.start_round, 7);

    msg_t g = from(MSG_GROUP, MSG_ROLE_ENGINE, 0);
    g.group = (msg_group_t){.round = 9, .wave = 1, .run = false};
    coordinator_on_message(w.coordinator, &g);
    msg_t f = from(MSG_FIRST_REQ, MSG_ROLE_FRONTEND, 0);
    coordinator_on_message(w.coordinator, &f);
    ck_assert_int_eq(w.starts, 3);
    ck_assert_uint_eq(w.start_round, 9);

    g.group = (msg_group_t){.round = 10, .wave = 1, .run = true};
    coordinator_on_message(w.coordinator, &g);
    coordinator_on_message(w.coordinator, &f); /* runs already */
    ck_assert_int_eq(w.starts, 3);
    g.group = (msg_group_t){.round = 9, .wave = 1, .run = false}; /* late: ignored */
    coordinator_on_message(w.coordinator, &g);
    step(&w, NULL);
    ck_assert(w.run);
    g.group = (msg_group_t){.round = 11, .wave = 2, .paused = true};
    coordinator_on_message(w.coordinator, &g);
    coordinator_on_message(w.coordinator, &f); /* paused: a START would wake nobody */
    ck_assert_int_eq(w.starts, 3);
    step(&w, NULL);
    ck_assert(w.paused);
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(silence_is_death_by_name_until_it_speaks)
{
    world_t w;
    start_cluster(&w);
    w.now_ns += 4 * LK_SECOND_NS;
    heartbeat(&w, MSG_ROLE_ENGINE, 0);
    heartbeat(&w, MSG_ROLE_FRONTEND, 0);
    w.now_ns += 2 * LK_SECOND_NS;
    ck_assert_int_eq(step(&w, NULL), LK_OK);
    ck_assert_uint_eq(w.n_dead, 1);
    ck_assert_str_eq(w.dead, "engine 1: silent for 6.0 s");
    heartbeat(&w, MSG_ROLE_ENGINE, 1);
    step(&w, NULL);
    ck_assert_uint_eq(w.n_dead, 0);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* Endless input must not starve publication (it is timer driven), nor cause a message per input. */
START_TEST(loads_are_published_by_the_clock)
{
    world_t w;
    start_cluster(&w);
    int before = w.stats;
    for (int i = 1; i <= 1000; i++) {
        w.now_ns += LK_MS_NS;
        msg_t m = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
        m.load_report.load = (msg_load_t){.rank = 1, .waiting = (uint64_t)i};
        coordinator_on_message(w.coordinator, &m);
        step(&w, NULL);
    }
    ck_assert_int_ge(w.stats - before, 9);
    ck_assert_int_le(w.stats - before, 12);
    ck_assert_uint_ge(w.waiting1, 900);
    msg_t bad = from(MSG_LOAD, MSG_ROLE_ENGINE, 1);
    bad.load_report.load.rank = 77;
    coordinator_on_message(w.coordinator, &bad);
    msg_t odd = from(MSG_SEEN, MSG_ROLE_ENGINE, 1);
    coordinator_on_message(w.coordinator, &odd);
    coordinator_destroy(&w.coordinator);
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("coordinator");
    TCase *tc = tcase_create("coordinator");
    tcase_add_test(tc, handshake_ends_in_serving);
    tcase_add_test(tc, strangers_are_refused_by_name);
    tcase_add_test(tc, handshake_deadline_names_who_is_late);
    tcase_add_test(tc, loads_of_a_starting_cluster_keep_nobody_busy);
    tcase_add_test(tc, failed_or_different_loads_stop_the_start);
    tcase_add_test(tc, announce_and_first_req_become_invitations);
    tcase_add_test(tc, silence_is_death_by_name_until_it_speaks);
    tcase_add_test(tc, loads_are_published_by_the_clock);
    suite_add_tcase(s, tc);
    return s;
}
