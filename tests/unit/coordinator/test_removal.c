/* Ranks that the launcher removes: the coordinator of three engines and one front end. */
#include "base/buf.h"
#include "base/check.h"
#include "coordinator/coordinator.h"
#include "tests/lib/test_main.h"

#include <stdio.h>
#include <string.h>

#define N 3

typedef struct {
    coordinator_t *coordinator;
    uint64_t now_ns;
    lk_env_t env;
    /* of the newest INIT to an engine */
    int inits;
    uint64_t epoch, dp_size;
    char members[64], mesh[128];
    char refusal[LK_ERROR_TEXT_MAX];
    int dissolves;
    uint64_t dissolved;
    int64_t lost;
    /* of the newest STATS */
    bool serving;
    char removed[256], loads[64], why[LK_ERROR_TEXT_MAX];
    size_t n_dead;
    uint64_t num_blocks;
} world_t;

static uint64_t now(void *ctx)
{
    return ((world_t *)ctx)->now_ns;
}

static void on_reply(void *ctx, uint32_t role, uint32_t rank, uint64_t generation, const msg_t *msg)
{
    world_t *w = ctx;
    if (msg->type == MSG_DISSOLVE) {
        w->dissolves++;
        w->dissolved = msg->dissolve.group_epoch;
        w->lost = msg->dissolve.lost;
        return;
    }
    if (msg->init.error.len > 0) {
        snprintf(w->refusal, sizeof w->refusal, "%s", msg_cstr(msg->init.error));
        return;
    }
    if (role != MSG_ROLE_ENGINE) {
        return;
    }
    w->inits++;
    w->epoch = msg->init.group_epoch;
    w->dp_size = msg->init.dp_size;
    w->members[0] = w->mesh[0] = '\0';
    ck_assert_uint_eq(msg->init.mesh.count, msg->init.members.count);
    for (size_t i = 0; i < msg->init.members.count; i++) {
        size_t n = strlen(w->members), m = strlen(w->mesh);
        snprintf(w->members + n, sizeof w->members - n, "%u ",
                 (unsigned)msg->init.members.items[i].rank);
        snprintf(w->mesh + m, sizeof w->mesh - m, "%s ", msg_cstr(msg->init.mesh.items[i].text));
    }
}

static void on_stats(void *ctx, const msg_t *msg)
{
    world_t *w = ctx;
    if (msg->type != MSG_STATS) {
        return;
    }
    const msg_stats_t *s = &msg->stats;
    w->serving = s->serving;
    w->n_dead = s->dead.count;
    w->num_blocks = s->num_blocks;
    snprintf(w->why, sizeof w->why, "%s", msg_cstr(s->why));
    w->removed[0] = w->loads[0] = '\0';
    for (size_t i = 0; i < s->removed.count; i++) {
        size_t n = strlen(w->removed);
        snprintf(w->removed + n, sizeof w->removed - n, "%u: %s; ",
                 (unsigned)s->removed.items[i].rank, msg_cstr(s->removed.items[i].why));
    }
    for (size_t i = 0; i < s->loads.count; i++) {
        size_t n = strlen(w->loads);
        snprintf(w->loads + n, sizeof w->loads - n, "%u ", (unsigned)s->loads.items[i].rank);
    }
}

static void on_wave(void *ctx, const msg_t *msg)
{
}

static void world_init(world_t *w, uint64_t life)
{
    *w = (world_t){.now_ns = 1000 * LK_SECOND_NS};
    w->env = (lk_env_t){.ctx = w, .now_ns = now};
    coordinator_config_t config = {.dp_size = N,
                                   .n_frontends = 1,
                                   .shrinks = true,
                                   .config_hash = "h",
                                   .events_address = "e",
                                   .stats_address = "s",
                                   .wave_address = "w",
                                   .life = life,
                                   .handshake_timeout_ns = 100 * LK_SECOND_NS,
                                   .dead_after_ns = 5 * LK_SECOND_NS,
                                   .heartbeat_ns = LK_SECOND_NS,
                                   .env = &w->env,
                                   .host = {w, on_reply, on_stats, on_wave}};
    w->coordinator = coordinator_new(&config);
    ck_assert_ptr_nonnull(w->coordinator);
}

static void step(world_t *w)
{
    lk_status_t status;
    lk_error_t err = LK_ERROR_INIT;
    w->now_ns += 5 * LK_MS_NS;
    coordinator_step(w->coordinator, &status, &err);
    ck_assert_msg(status == LK_OK, "%s", err.text);
}

typedef struct {
    uint64_t left, member_of, members;
} where_t;

static void come(world_t *w, uint32_t rank, uint64_t generation, where_t where)
{
    char mesh[48];
    snprintf(mesh, sizeof mesh, "mesh%u.%u.%u", rank, (unsigned)generation, (unsigned)where.left);
    msg_t m = {.type = MSG_HELLO,
               .sender_role = MSG_ROLE_ENGINE,
               .sender_rank = rank,
               .generation = generation};
    m.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                            .rank = rank,
                            .pid = 100 * generation + rank,
                            .config_hash = msg_str("h"),
                            .mesh_address = msg_str(mesh),
                            .left_epoch = where.left,
                            .heard_epoch = where.left,
                            .member_of = where.member_of,
                            .members = where.members};
    coordinator_on_message(w->coordinator, &m);
}

static void frontend_comes(world_t *w)
{
    msg_t m = {.type = MSG_HELLO, .sender_role = MSG_ROLE_FRONTEND, .generation = 1};
    m.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND, .pid = 5, .config_hash = msg_str("h")};
    coordinator_on_message(w->coordinator, &m);
    m = (msg_t){.type = MSG_READY, .sender_role = MSG_ROLE_FRONTEND, .generation = 1};
    m.ready = (msg_ready_t){.role = MSG_ROLE_FRONTEND};
    coordinator_on_message(w->coordinator, &m);
}

static void be_ready(world_t *w, uint32_t rank, uint64_t generation, uint64_t epoch,
                     const char *error)
{
    msg_t m = {.type = MSG_READY,
               .sender_role = MSG_ROLE_ENGINE,
               .sender_rank = rank,
               .generation = generation};
    m.ready = (msg_ready_t){.role = MSG_ROLE_ENGINE,
                            .rank = rank,
                            .num_blocks = 100,
                            .digest = msg_str("d"),
                            .group_epoch = epoch,
                            .error = msg_str(error)};
    coordinator_on_message(w->coordinator, &m);
}

static void start_cluster(world_t *w)
{
    world_init(w, 1);
    frontend_comes(w);
    for (uint32_t r = 0; r < N; r++) {
        come(w, r, 1, (where_t){0});
    }
    for (uint32_t r = 0; r < N; r++) {
        be_ready(w, r, 1, 1, NULL);
    }
    step(w);
    ck_assert(w->serving);
    ck_assert_str_eq(w->members, "0 1 2 ");
    ck_assert_str_eq(w->removed, "");
}

static lk_status_t tell(world_t *w, const char *line, lk_error_t *err)
{
    return coordinator_on_launcher(w->coordinator, line, err);
}

START_TEST(the_survivors_form_the_next_group)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    start_cluster(&w);
    ck_assert_int_eq(tell(&w, "removed 1 killed by signal 9 (Killed)", &err), LK_OK);
    ck_assert_int_eq(w.dissolves, 2); /* there is nobody to tell the third */
    ck_assert_uint_eq(w.dissolved, 1);
    ck_assert_int_eq(w.lost, 1);
    step(&w);
    ck_assert(!w.serving);
    ck_assert_str_eq(w.why, "engine 1 was removed: killed by signal 9 (Killed)");
    come(&w, 2, 1, (where_t){.left = 1});
    int inits = w.inits;
    come(&w, 0, 1, (where_t){.left = 1});
    ck_assert_int_eq(w.inits, inits + 2);
    ck_assert_uint_eq(w.epoch, 2);
    ck_assert_uint_eq(w.dp_size, N);
    ck_assert_str_eq(w.members, "0 2 ");
    ck_assert_str_eq(w.mesh, "mesh0.1.1 mesh2.1.1 ");
    be_ready(&w, 0, 1, 2, NULL);
    be_ready(&w, 2, 1, 2, NULL);
    step(&w);
    ck_assert(w.serving);
    ck_assert_str_eq(w.removed, "1: killed by signal 9 (Killed); ");
    ck_assert_str_eq(w.loads, "0 2 ");
    ck_assert_uint_eq(w.num_blocks, 200);
    ck_assert_uint_eq(w.n_dead, 0);
    /* it does not come back, in any life */
    for (uint64_t life = 1; life < 4; life++) {
        w.refusal[0] = '\0';
        come(&w, 1, life, (where_t){0});
        ck_assert_str_eq(w.refusal, "engine 1 was removed from the cluster (killed by signal 9 "
                                    "(Killed)) and can not come back");
    }
    ck_assert(coordinator_serving(w.coordinator));
    /* another one; the last one stays */
    ck_assert_int_eq(tell(&w, "removed 0 gone", &err), LK_OK);
    come(&w, 2, 1, (where_t){.left = 2});
    ck_assert_str_eq(w.members, "2 ");
    be_ready(&w, 2, 1, 3, NULL);
    ck_assert(coordinator_serving(w.coordinator));
    ck_assert_int_eq(tell(&w, "removed 2 gone", &err), LK_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "rank 2"));
    ck_assert(coordinator_serving(w.coordinator));
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* Whatever comes first: the others' HELLO, or the launcher's word. */
START_TEST(the_word_may_come_last)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    start_cluster(&w);
    come(&w, 0, 1, (where_t){.left = 1});
    come(&w, 2, 1, (where_t){.left = 1});
    ck_assert_uint_eq(w.epoch, 1);
    ck_assert_int_eq(tell(&w, "removed 1 x", &err), LK_OK);
    ck_assert_uint_eq(w.epoch, 2);
    ck_assert_str_eq(w.members, "0 2 ");
    /* while they connect another is removed */
    ck_assert_int_eq(tell(&w, "removed 2 y", &err), LK_OK);
    ck_assert_uint_eq(w.dissolved, 2);
    come(&w, 0, 1, (where_t){.left = 2});
    ck_assert_uint_eq(w.epoch, 3);
    ck_assert_str_eq(w.members, "0 ");
    coordinator_destroy(&w.coordinator);
}
END_TEST

START_TEST(the_launcher_is_read_strictly)
{
    static const char *const lines[] = {"",
                                        "removed",
                                        "removed ",
                                        "removed 1",
                                        "removed 1 ",
                                        "removed 3 x",
                                        "removed -1 x",
                                        "removed +1 x",
                                        "removed 01 x",
                                        "removed 1x y",
                                        "removed  1 x",
                                        "Removed 1 x",
                                        "removed 99999999999999999999 x",
                                        "remove 1 x"};
    world_t w;
    start_cluster(&w);
    for (size_t i = 0; i < LK_ARRAY_LEN(lines); i++) {
        lk_error_t err = LK_ERROR_INIT;
        ck_assert_msg(tell(&w, lines[i], &err) == LK_ERR_INVALID, "'%s'", lines[i]);
        ck_assert_uint_gt(strlen(err.text), 0);
    }
    static const char *const lists[] = {",", "1,", ",1", "1,,2", "1 2", "x", "3", "0,1,2", "1;2"};
    for (size_t i = 0; i < LK_ARRAY_LEN(lists); i++) {
        lk_error_t err = LK_ERROR_INIT;
        world_t other;
        world_init(&other, 2);
        ck_assert_msg(coordinator_remove_all(other.coordinator, lists[i], &err) == LK_ERR_INVALID,
                      "'%s'", lists[i]);
        coordinator_destroy(&other.coordinator);
    }
    ck_assert(coordinator_serving(w.coordinator));
    step(&w);
    ck_assert_str_eq(w.removed, "");
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* A later life knows it from its flag, and why from the lines that follow. */
START_TEST(a_later_life_finds_the_survivors)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w, 2);
    ck_assert_int_eq(coordinator_remove_all(w.coordinator, "1", &err), LK_OK);
    frontend_comes(&w);
    come(&w, 0, 1, (where_t){.member_of = 4, .members = 2});
    be_ready(&w, 0, 1, 4, NULL);
    come(&w, 2, 1, (where_t){.member_of = 4, .members = 2});
    be_ready(&w, 2, 1, 4, NULL);
    ck_assert(coordinator_serving(w.coordinator));
    ck_assert_int_eq(w.dissolves, 0);
    ck_assert_str_eq(w.members, "0 2 ");
    ck_assert_int_eq(tell(&w, "removed 1 killed", &err), LK_OK);
    step(&w);
    ck_assert_str_eq(w.removed, "1: killed; ");
    ck_assert(w.serving);
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* The rank died, and this coordinator's last life with it: the others may not know yet. A group
 * that the removed rank was in is not whole. */
START_TEST(a_group_with_a_removed_rank_is_not_adopted)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w, 2);
    ck_assert_int_eq(coordinator_remove_all(w.coordinator, "1", &err), LK_OK);
    frontend_comes(&w);
    come(&w, 0, 1, (where_t){.member_of = 4, .members = 3});
    come(&w, 2, 1, (where_t){.member_of = 4, .members = 3});
    ck_assert(!coordinator_serving(w.coordinator));
    ck_assert_uint_eq(w.dissolved, 4);
    ck_assert_int_eq(w.inits, 0);
    come(&w, 0, 1, (where_t){.left = 4});
    come(&w, 2, 1, (where_t){.left = 4});
    ck_assert_uint_eq(w.epoch, 5);
    ck_assert_str_eq(w.members, "0 2 ");
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* It said that it is in a group, and is removed before everybody has come. */
START_TEST(removed_while_gathering)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    world_init(&w, 2);
    frontend_comes(&w);
    come(&w, 1, 1, (where_t){.member_of = 4, .members = 3});
    come(&w, 0, 1, (where_t){.member_of = 4, .members = 3});
    ck_assert_int_eq(tell(&w, "removed 1 x", &err), LK_OK);
    ck_assert_uint_eq(w.dissolved, 4);
    come(&w, 2, 1, (where_t){.left = 4});
    come(&w, 0, 1, (where_t){.left = 4});
    ck_assert_uint_eq(w.epoch, 5);
    ck_assert_str_eq(w.members, "0 2 ");
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* What it can not be started for again is for the launcher to judge. */
START_TEST(an_engine_that_can_not_start_again_does_not_end_the_cluster)
{
    world_t w;
    lk_error_t err = LK_ERROR_INIT;
    start_cluster(&w);
    come(&w, 0, 1, (where_t){.left = 1});
    come(&w, 2, 1, (where_t){.left = 1});
    be_ready(&w, 1, 2, 0, "no such device"); /* nothing was heard of that life: dropped */
    come(&w, 1, 3, (where_t){0});
    be_ready(&w, 1, 3, 2, "no such device");
    step(&w);
    ck_assert_int_eq(tell(&w, "removed 1 no such device", &err), LK_OK);
    come(&w, 0, 1, (where_t){.left = 2});
    come(&w, 2, 1, (where_t){.left = 2});
    ck_assert_str_eq(w.members, "0 2 ");
    coordinator_destroy(&w.coordinator);
}
END_TEST

/* The launcher's reason is longer than what is kept of it: it is cut between two characters. */
START_TEST(a_long_reason_stays_utf8)
{
    for (int shift = 0; shift < 3; shift++) {
        world_t w;
        lk_error_t err = LK_ERROR_INIT;
        char line[LK_ERROR_TEXT_MAX];
        start_cluster(&w);
        size_t n = (size_t)snprintf(line, sizeof line, "removed 1 %.*s", shift, "aa");
        for (size_t i = 0; i < 100; i++) {
            n += (size_t)snprintf(line + n, sizeof line - n, "\u6a21");
        }
        ck_assert_int_eq(tell(&w, line, &err), LK_OK);
        step(&w);
        ck_assert(lk_utf8_valid(w.removed, strlen(w.removed)));
        ck_assert(lk_utf8_valid(w.why, strlen(w.why)));
        ck_assert_uint_gt(strlen(w.removed), 150);
        coordinator_destroy(&w.coordinator);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *s = suite_create("removal");
    TCase *tc = tcase_create("removal");
    tcase_add_test(tc, the_survivors_form_the_next_group);
    tcase_add_test(tc, the_word_may_come_last);
    tcase_add_test(tc, the_launcher_is_read_strictly);
    tcase_add_test(tc, a_later_life_finds_the_survivors);
    tcase_add_test(tc, a_group_with_a_removed_rank_is_not_adopted);
    tcase_add_test(tc, removed_while_gathering);
    tcase_add_test(tc, an_engine_that_can_not_start_again_does_not_end_the_cluster);
    tcase_add_test(tc, a_long_reason_stays_utf8);
    suite_add_tcase(s, tc);
    return s;
}
