#include "base/check.h"
#include "tests/lib/test_main.h"
#include "tests/unit/api_frontend/fake_group.h"

#include <stdio.h>
#include <string.h>

/* A literal and its length. */
#define TEXT(literal) literal, sizeof(literal) - 1

static fake_group_t g;

typedef struct {
    int calls;
    lk_status_t status;
    char text[1024];
    char bodies[FG_MAX_RANKS][64];
} outcome_t;

static void on_result(void *ctx, const engine_result_t *result)
{
    outcome_t *o = ctx;
    o->calls++;
    o->status = result->status;
    snprintf(o->text, sizeof o->text, "%s", result->text);
    for (size_t r = 0; r < result->n_answers && r < FG_MAX_RANKS; r++) {
        snprintf(o->bodies[r], sizeof o->bodies[r], "%s", result->answers[r].body);
    }
}

typedef struct {
    int outputs, ends;
    size_t tokens;
    finish_reason_t finish;
    char error[512];
    int64_t error_status;
} stream_t;

static void on_output(void *ctx, uint64_t handle, const msg_output_t *out)
{
    stream_t *s = ctx;
    s->outputs++;
    s->tokens += out->token_ids.len / 4;
    if (out->finish_reason != FINISH_NONE) {
        s->ends++;
        s->finish = (finish_reason_t)out->finish_reason;
        snprintf(s->error, sizeof s->error, "%s", msg_cstr(out->error));
        s->error_status = out->error_status;
    }
}

static uint64_t add(stream_t *s, int64_t rank)
{
    static const uint32_t prompt[] = {1, 2, 3};
    engine_request_t request = {.id = "r", .prompt = prompt, .n_prompt = 3, .rank = rank};
    uint64_t handle = 0;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(engine_client_add(g.client, &request, on_output, s, &handle, &err) == LK_OK, "%s",
                  err.text);
    return handle;
}

static void setup2(void)
{
    fg_init(&g, 2, false);
}

static void teardown(void)
{
    fg_fini(&g);
}

/* ---- requests ---- */

START_TEST(test_request_outputs)
{
    stream_t a = {0}, b = {0};
    uint64_t ha = add(&a, 0), hb = add(&b, 1);
    ck_assert_uint_ne(ha, hb);
    const msg_t *msg = fg_take(&g, 0, MSG_ADD);
    ck_assert_ptr_nonnull(msg);
    ck_assert_uint_eq(msg->add.handle, ha);
    ck_assert_uint_eq(msg->add.prompt.len, 12);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_ADD), 0);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ADD), 1);
    /* the group did not run: one hint, not one per request */
    ck_assert_uint_eq(fg_count(&g, FG_COORDINATOR, MSG_FIRST_REQ), 1);

    fg_output(&g, 0, ha, 10, 2, FINISH_NONE);
    fg_output(&g, 1, hb, 10, 1, FINISH_NONE);
    fg_output(&g, 0, ha, 12, 1, FINISH_LENGTH);
    ck_assert_int_eq(a.ends, 1);
    ck_assert_uint_eq(a.tokens, 3);
    ck_assert_int_eq(a.finish, FINISH_LENGTH);
    ck_assert_int_eq(b.ends, 0);
    fg_output(&g, 0, ha, 13, 1, FINISH_LENGTH); /* a second end is not delivered */
    ck_assert_int_eq(a.ends, 1);
    fg_output(&g, 0, hb, 13, 1, FINISH_STOP); /* another rank's handle is not its to end */
    ck_assert_int_eq(b.ends, 0);
    ck_assert_uint_eq(engine_client_num_requests(g.client), 1);
}
END_TEST

START_TEST(test_running_group_gets_no_hint)
{
    stream_t a = {0};
    fg_stats(&g, true, true, 1, NULL);
    add(&a, -1);
    ck_assert_uint_eq(fg_count(&g, FG_COORDINATOR, MSG_FIRST_REQ), 0);
    fg_stats(&g, true, false, 1, NULL);
    add(&a, -1);
    ck_assert_uint_eq(fg_count(&g, FG_COORDINATOR, MSG_FIRST_REQ), 1);
}
END_TEST

START_TEST(test_abort)
{
    stream_t a = {0};
    uint64_t h = add(&a, 1);
    ck_assert(engine_client_abort(g.client, h));
    const msg_t *msg = fg_take(&g, 1, MSG_ABORT);
    ck_assert_ptr_nonnull(msg);
    ck_assert_uint_eq(msg->abort.handles.count, 1);
    ck_assert_uint_eq(msg->abort.handles.items[0].handle, h);
    ck_assert(!engine_client_abort(g.client, h));
    fg_output(&g, 1, h, 0, 1, FINISH_ABORT);
    ck_assert_int_eq(a.outputs, 0);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ABORT), 0);
    /* the ABORT was lost: the engine still works for nobody, and is told so again */
    fg_output(&g, 1, h, 0, 1, FINISH_NONE);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ABORT), 1);
}
END_TEST

START_TEST(test_unreachable_and_limit)
{
    stream_t a = {0};
    static const uint32_t prompt[] = {1};
    engine_request_t request = {.prompt = prompt, .n_prompt = 1, .rank = 0};
    uint64_t handle;
    lk_error_t err;
    g.queues[0].down = true;
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &a, &handle, &err),
                     LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(err.text, "engine 0 is not connected");
    request.rank = 2;
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &a, &handle, &err),
                     LK_ERR_INVALID);
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
}
END_TEST

START_TEST(test_many_requests)
{
    static stream_t streams[3000];
    static uint64_t handles[3000];
    memset(streams, 0, sizeof streams);
    for (size_t i = 0; i < 3000; i++) {
        handles[i] = add(&streams[i], -1);
        fg_drop_all(&g);
        for (size_t r = 0; r <= FG_MAX_RANKS; r++) {
            for (size_t k = 0; k < g.queues[r].n; k++) {
                msg_fini(&g.queues[r].msgs[k]);
            }
            g.queues[r].n = g.queues[r].first = 0;
        }
    }
    /* by load: an even share each */
    size_t on_rank0 = 0;
    for (size_t i = 0; i < 3000; i++) {
        fg_output(&g, 0, handles[i], 0, 1, FINISH_LENGTH);
        on_rank0 += streams[i].ends;
        fg_output(&g, 1, handles[i], 0, 1, FINISH_LENGTH);
        ck_assert_int_eq(streams[i].ends, 1);
    }
    ck_assert_uint_eq(on_rank0, 1500);
    ck_assert_uint_eq(engine_client_num_requests(g.client), 0);
}
END_TEST

/* ---- broken connections ---- */

/* An engine's heartbeat over the output socket. */
static void beat(uint32_t rank, uint64_t generation, uint64_t sequence)
{
    msg_t msg = {.type = MSG_HEARTBEAT,
                 .sender_role = MSG_ROLE_ENGINE,
                 .sender_rank = rank,
                 .generation = generation,
                 .sequence = sequence};
    msg.heartbeat = (msg_heartbeat_t){.role = MSG_ROLE_ENGINE, .rank = rank};
    engine_client_on_msg(g.client, &msg);
}

static void expect_broken(const stream_t *s, uint32_t rank)
{
    ck_assert_int_eq(s->ends, 1);
    ck_assert_int_eq(s->finish, FINISH_ERROR);
    ck_assert_int_eq(s->error_status, LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(s->error, "the connection to engine 0 broke; try again");
    const msg_t *msg = fg_take(&g, rank, MSG_ABORT);
    ck_assert(msg != NULL && msg->abort.handles.count == 0);
}

START_TEST(test_lost_outputs)
{
    stream_t a = {0}, b = {0}, c = {0};
    outcome_t info = {0}, pause = {0};
    add(&a, 0);
    add(&b, 1);
    engine_client_utility(g.client, "weight_info", "", 0, on_result, &info);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    beat(0, 1, 1);
    beat(0, 1, 2);
    ck_assert_int_eq(a.ends, 0);
    beat(0, 1, 4); /* what was the third? */
    expect_broken(&a, 0);
    ck_assert_int_eq(b.ends, 0);
    add(&c, 0);
    beat(0, 1, 5);
    ck_assert_int_eq(c.ends, 0);
    msg_t reply = {.type = MSG_UTILITY_REPLY};
    reply.utility_reply.rank = 1;
    const msg_t *asked = fg_take(&g, 1, MSG_UTILITY);
    reply.utility_reply.call_id = asked->utility.call_id;
    engine_client_on_msg(g.client, &reply);
    ck_assert_int_eq(info.calls, 1);
    ck_assert_int_eq(info.status, LK_ERR_UNAVAILABLE);
    ck_assert_int_eq(pause.calls, 0); /* commands and their answers are repeated */
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 1);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_CMD), 1);
}
END_TEST

START_TEST(test_lost_inputs)
{
    stream_t a = {0}, b = {0};
    add(&a, 0);
    add(&b, 1);
    msg_t msg = {.type = MSG_MISSED};
    msg.missed = (msg_missed_t){0, g.config.generation - 1}; /* an earlier life's loss */
    engine_client_on_msg(g.client, &msg);
    ck_assert_int_eq(a.ends, 0);
    msg.missed.generation++;
    engine_client_on_msg(g.client, &msg);
    expect_broken(&a, 0);
    ck_assert_int_eq(b.ends, 0);
}
END_TEST

/* What an engine has said to our predecessor is no gap; nor is a HERE that comes once a second. */
START_TEST(test_where_numbers_begin)
{
    stream_t a = {0};
    outcome_t pause = {0};
    msg_t here = {.type = MSG_ENGINE_HERE};
    here.engine_here =
        (msg_engine_here_t){.rank = 0, .generation = 9, .group_epoch = 1, .said = 40};
    engine_client_on_msg(g.client, &here);
    add(&a, 0);
    beat(0, 9, 41);
    ck_assert_int_eq(a.ends, 0);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 1);
    here.engine_here.said = 43; /* it overtakes them */
    engine_client_on_msg(g.client, &here);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 1);
    beat(0, 9, 42);
    ck_assert_int_eq(a.ends, 0);
    beat(0, 9, 44);
    ck_assert_int_eq(a.ends, 1);
    /* and we give engines the chance to see what they miss */
    fg_drop_all(&g);
    fg_advance(&g, ENGINE_CLIENT_RESEND_NS);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_HEARTBEAT), 1);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_HEARTBEAT), 1);
}
END_TEST

/* ---- dead engines ---- */

START_TEST(test_dead_engine_dense)
{
    stream_t a = {0}, b = {0};
    outcome_t pause = {0}, info = {0}, late = {0};
    add(&a, 0);
    uint64_t hb = add(&b, 1);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    engine_client_utility(g.client, "weight_info", "", 0, on_result, &info);
    msg_t msg = {.type = MSG_ENGINE_DEAD};
    msg.engine_dead = (msg_engine_dead_t){0, msg_str("forward pass failed")};
    engine_client_on_msg(g.client, &msg);

    ck_assert_int_eq(a.ends, 1);
    ck_assert_int_eq(a.finish, FINISH_ERROR);
    ck_assert_int_eq(a.error_status, LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(a.error, "engine 0: forward pass failed");
    ck_assert_int_eq(b.ends, 0);
    ck_assert_int_eq(pause.calls, 1);
    ck_assert_int_eq(pause.status, LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(pause.text, "engine 0: forward pass failed");
    ck_assert_int_eq(info.calls, 0); /* rank 1 can still say something */

    engine_client_resume(g.client, 0, on_result, &late);
    ck_assert_int_eq(late.calls, 1);
    ck_assert_int_eq(late.status, LK_ERR_UNAVAILABLE);
    add(&a, -1);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ADD), 2);
    fg_output(&g, 1, hb, 0, 1, FINISH_STOP);
    ck_assert_int_eq(b.ends, 1);

    /* it is back when a new life of it is in a new epoch, together with all others */
    fg_stats(&g, true, false, 2, NULL);
    ck_assert_ptr_nonnull(engine_client_dead_reason(g.client, 0));
    fg_here(&g, 1, 1, 2);
    fg_here(&g, 0, 2, 2);
    ck_assert_ptr_null(engine_client_dead_reason(g.client, 0));
    ck_assert_ptr_null(engine_client_closed_reason(g.client));
    outcome_t again = {0};
    fg_drop_all(&g);
    engine_client_resume(g.client, 0, on_result, &again);
    const msg_t *cmd = fg_take(&g, 0, MSG_CMD);
    ck_assert_ptr_nonnull(cmd);
    ck_assert_uint_eq(cmd->cmd.number, 1); /* a new generation counts from 1 */
    ck_assert_uint_gt(cmd->cmd.generation, 77);
    ck_assert_uint_eq(cmd->cmd.group_epoch, 2);
    /* nor does a coordinator that does not serve yet, and names no reason */
    fg_stats(&g, false, false, 2, NULL);
    ck_assert_ptr_null(engine_client_closed_reason(g.client));
    ck_assert_int_eq(again.calls, 0);
    /* what the old epoch still says means nothing */
    fg_stats(&g, false, false, 1, "engine 1: silent for 5.0 s");
    fg_left(&g, 1, 1, 0, "late");
    fg_here(&g, 0, 1, 1);
    ck_assert_ptr_null(engine_client_dead_reason(g.client, 1));
    ck_assert_ptr_null(engine_client_closed_reason(g.client));
    ck_assert_int_eq(again.calls, 0);
}
END_TEST

/* A survivor says who is lost, before the coordinator does. */
START_TEST(test_left_dense)
{
    stream_t a = {0}, b = {0};
    outcome_t pause = {0}, late = {0};
    add(&a, 0);
    uint64_t hb = add(&b, 1);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    fg_left(&g, 1, 1, 0, "rank 0 closed its mesh connection");
    const char *text = "engine 0 is lost (rank 0 closed its mesh connection); the group is formed "
                       "anew, try again";
    ck_assert_int_eq(a.ends, 1);
    ck_assert_str_eq(a.error, text);
    ck_assert_int_eq(b.ends, 0);
    ck_assert_str_eq(pause.text, text);
    engine_client_resume(g.client, 0, on_result, &late);
    ck_assert_str_eq(late.text, text);
    fg_output(&g, 1, hb, 0, 1, FINISH_STOP); /* it goes on */
    ck_assert_int_eq(b.ends, 1);
    add(&a, -1);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ADD), 2);
}
END_TEST

START_TEST(test_left_lockstep)
{
    fg_fini(&g);
    fg_init(&g, 2, true);
    stream_t a = {0};
    outcome_t info = {0};
    add(&a, 0);
    engine_client_utility(g.client, "weight_info", "", 0, on_result, &info);
    fg_left(&g, 0, 1, -1, "out of step"); /* nobody's death */
    ck_assert_int_eq(a.ends, 1);
    ck_assert_ptr_nonnull(strstr(a.error, "engine 0 left the group (out of step)"));
    ck_assert_int_eq(info.calls, 0);
    static const uint32_t prompt[] = {1};
    engine_request_t request = {.prompt = prompt, .n_prompt = 1, .rank = 0};
    uint64_t handle;
    lk_error_t err;
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &a, &handle, &err),
                     LK_ERR_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(err.text, "engine 0 left the group (out of step)"));
    /* not before every rank is in the new epoch and the coordinator says so */
    fg_here(&g, 0, 1, 2);
    fg_here(&g, 1, 1, 2);
    ck_assert_ptr_nonnull(engine_client_closed_reason(g.client));
    fg_stats(&g, true, false, 2, NULL);
    ck_assert_ptr_null(engine_client_closed_reason(g.client));
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &a, &handle, &err), LK_OK);
    /* a rank that speaks for itself is not lost, whoever says so */
    fg_left(&g, 1, 2, -1, "x");
    fg_left(&g, 0, 2, 1, "rank 1 closed its mesh connection");
    ck_assert_ptr_null(engine_client_dead_reason(g.client, 1));
    ck_assert_ptr_nonnull(engine_client_closed_reason(g.client));
}
END_TEST

/* A dense rank came back so fast that nobody missed it: what its old life had is over. */
static void setup3(void)
{
    fg_init(&g, 3, false);
}

static bool is_whole(void)
{
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    return info.whole;
}

/* The others are enough for everything; it gets nothing, and a request for it is told why. */
START_TEST(test_removed_rank)
{
    stream_t lost = {0}, stays = {0};
    outcome_t pause = {0}, info_call = {0};
    for (uint32_t r = 0; r < 3; r++) {
        fg_here(&g, r, 1, 1);
    }
    add(&lost, 1);
    uint64_t handle = add(&stays, 2);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    engine_client_utility(g.client, "weight_info", "", 0, on_result, &info_call);
    fg_removed(&g, false, 1, 1, "killed by signal 9 (Killed)");
    ck_assert_int_eq(lost.ends, 1);
    ck_assert_int_eq(lost.error_status, LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(lost.error, "engine 1 was removed: killed by signal 9 (Killed)");
    ck_assert_int_eq(pause.status, LK_ERR_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(pause.text, "engine 1 was removed"));
    ck_assert_int_eq(stays.ends, 0);
    ck_assert_ptr_null(engine_client_dead_reason(g.client, 1));
    ck_assert_str_eq(engine_client_removed_reason(g.client, 1), lost.error);
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert(info.n_members == 2 && info.n_ranks == 3 && info.n_dead == 0);
    fg_left(&g, 0, 1, 1, "rank 1 closed its mesh connection"); /* late */
    fg_removed(&g, false, 1, 1, "again");

    fg_here(&g, 0, 1, 2);
    fg_removed(&g, true, 2, 1, "again");
    ck_assert(!is_whole());
    fg_here(&g, 2, 1, 2);
    ck_assert(is_whole());
    ck_assert_ptr_null(engine_client_closed_reason(g.client));
    fg_here(&g, 1, 2, 2); /* nonsense: it does not come back */
    ck_assert_ptr_nonnull(engine_client_removed_reason(g.client, 1));

    static const uint32_t prompt[] = {1};
    engine_request_t request = {.id = "r", .prompt = prompt, .n_prompt = 1, .rank = 1};
    uint64_t unused = 0;
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &lost, &unused, &err),
                     LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(err.text, lost.error);
    fg_drop_all(&g);
    stream_t any[20] = {{0}};
    for (int i = 0; i < 20; i++) {
        add(&any[i], -1);
    }
    ck_assert_uint_eq(fg_count(&g, 1, MSG_ADD), 0);
    ck_assert(fg_count(&g, 0, MSG_ADD) > 0 && fg_count(&g, 2, MSG_ADD) > 0);
    /* commands, utilities and beats go to the others, and wait for nobody else */
    outcome_t again = {0}, asked = {0}, late = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &again);
    fg_done(&g, 1, 1, LK_OK, "", "");
    fg_done(&g, 0, 1, LK_OK, "", "{\"a\": 0}");
    ck_assert_int_eq(again.calls, 0);
    fg_done(&g, 2, 1, LK_OK, "", "{\"a\": 2}");
    ck_assert_int_eq(again.calls, 1);
    ck_assert_int_eq(again.status, LK_OK);
    ck_assert_str_eq(again.bodies[1], "{\"a\": 2}"); /* one answer of each member */
    ck_assert_str_eq(again.bodies[2], "");
    engine_client_utility(g.client, "is_paused", "", 0, on_result, &asked);
    msg_t reply = {.type = MSG_UTILITY_REPLY};
    for (uint64_t r = 0; r < 3; r += 2) {
        uint64_t id = fg_take(&g, (uint32_t)r, MSG_UTILITY)->utility.call_id;
        reply.utility_reply = (msg_utility_reply_t){r, id, LK_OK, msg_str(""), msg_str("{}")};
        engine_client_on_msg(g.client, &reply);
    }
    ck_assert_int_eq(asked.calls, 1);
    ck_assert_int_eq(asked.status, LK_OK);
    engine_client_resume(g.client, 0, on_result, &late);
    fg_done(&g, 2, 2, LK_OK, "", "");
    fg_advance(&g, 40 * LK_SECOND_NS);
    ck_assert_int_eq(late.status, LK_ERR_TIMEOUT);
    ck_assert_msg(strstr(late.text, "rank 0 did not receive it") != NULL, "%s", late.text);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_CMD), 0);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_UTILITY), 0);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_HEARTBEAT), 0);
    fg_output(&g, 2, handle, 0, 1, FINISH_STOP);
    ck_assert_int_eq(stays.ends, 1);
}
END_TEST

/* A front end that is started again learns it from the first STATS; the last rank can't be removed.
 */
START_TEST(test_removed_before_it_came)
{
    fg_removed(&g, true, 3, 0, "x");
    fg_here(&g, 1, 1, 3);
    ck_assert(!is_whole());
    fg_here(&g, 2, 1, 3);
    ck_assert(is_whole());
    fg_removed(&g, true, 3, 1, "x");
    fg_removed(&g, true, 3, 2, "x");
    ck_assert_ptr_null(engine_client_removed_reason(g.client, 2));
    fg_removed(&g, true, 3, 77, "x");
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(info.n_members, 1);
}
END_TEST

/* A coordinator that was started again has not heard of the engines: what they are stays known. */
START_TEST(test_facts_outlive_a_coordinator)
{
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(info.max_model_len, 64);
    msg_t msg = {.type = MSG_STATS};
    msg.stats.group_epoch = info.group_epoch;
    engine_client_on_msg(g.client, &msg);
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(info.max_model_len, 64);
    ck_assert_uint_eq(info.vocab_size, 300);
}
END_TEST

/* What a rank says on its two sockets may overtake each other: callers hear the reason all the
 * same.
 */
START_TEST(test_here_comes_before_left)
{
    outcome_t pause = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    msg_t here = {.type = MSG_ENGINE_HERE};
    here.engine_here = (msg_engine_here_t){
        .rank = 0, .group_epoch = 2, .why = msg_str("rank 1 closed its mesh connection")};
    engine_client_on_msg(g.client, &here);
    ck_assert_int_eq(pause.status, LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(pause.text,
                     "the group of engines is being formed anew (rank 1 closed its mesh "
                     "connection); try again");
}
END_TEST

START_TEST(test_replaced_rank)
{
    stream_t a = {0}, b = {0};
    fg_here(&g, 0, 1, 1);
    fg_here(&g, 1, 1, 1);
    add(&a, 0);
    add(&b, 1);
    fg_here(&g, 0, 2, 2);
    ck_assert_int_eq(a.ends, 1);
    ck_assert_str_eq(a.error, "engine 0 has ended and was started again");
    ck_assert_int_eq(b.ends, 0);
    fg_here(&g, 1, 1, 2);
    ck_assert_int_eq(b.ends, 0);
}
END_TEST

START_TEST(test_dead_engine_expert_parallel)
{
    fg_fini(&g);
    fg_init(&g, 2, true);
    stream_t a = {0}, b = {0};
    add(&a, 0);
    add(&b, 1);
    fg_stats(&g, false, true, 1, "engine 1: silent for 5.0 s");
    ck_assert_int_eq(a.ends, 1);
    ck_assert_str_eq(a.error, "engine 1: silent for 5.0 s");
    ck_assert_int_eq(b.ends, 1);
    static const uint32_t prompt[] = {1};
    engine_request_t request = {.prompt = prompt, .n_prompt = 1, .rank = 0};
    uint64_t handle;
    lk_error_t err;
    ck_assert_int_eq(engine_client_add(g.client, &request, on_output, &a, &handle, &err),
                     LK_ERR_UNAVAILABLE);
    ck_assert_str_eq(err.text, "engine 1: silent for 5.0 s");
    fg_stats(&g, false, true, 1, "engine 1: silent for 6.0 s"); /* said once */
    ck_assert_int_eq(a.ends, 1);
}
END_TEST

/* ---- control calls ---- */

static void expect_cmd(uint32_t rank, uint64_t number, cmd_kind_t kind)
{
    const msg_t *msg = fg_take(&g, rank, MSG_CMD);
    ck_assert_msg(msg != NULL, "no CMD %d for rank %u", kind, rank);
    ck_assert_uint_eq(msg->cmd.number, number);
    ck_assert_uint_eq(msg->cmd.kind, kind);
    ck_assert_uint_eq(msg->cmd.generation, 77);
    ck_assert_uint_eq(msg->cmd.group_epoch, 1);
}

START_TEST(test_pause_needs_every_rank)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_KEEP, false, 0, on_result, &o);
    for (uint32_t r = 0; r < 2; r++) {
        const msg_t *msg = fg_take(&g, r, MSG_CMD);
        ck_assert_uint_eq(msg->cmd.mode, PAUSE_KEEP);
        ck_assert(!msg->cmd.clear_cache);
        fg_seen(&g, r, 1);
    }
    fg_done(&g, 0, 1, LK_OK, "", "");
    fg_done(&g, 0, 1, LK_OK, "", ""); /* repeated: counts once */
    ck_assert_int_eq(o.calls, 0);
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(o.status, LK_OK);
    fg_advance(&g, 60 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 1);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
}
END_TEST

START_TEST(test_pause_deadline_names_ranks_and_rolls_back)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_ABORT, true, 2 * LK_SECOND_NS, on_result, &o);
    fg_seen(&g, 0, 1);
    fg_advance(&g, 2 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(o.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(o.text, "pause was not completed within 2 s: rank 1 did not receive it; rank "
                             "0 did not finish; the pause is rolled back");
    for (uint32_t r = 0; r < 2; r++) {
        expect_cmd(r, 1, CMD_PAUSE);
        const msg_t *msg = fg_take(&g, r, MSG_CMD);
        while (msg != NULL && msg->cmd.kind == CMD_PAUSE) {
            msg = fg_take(&g, r, MSG_CMD); /* sent again meanwhile */
        }
        ck_assert_ptr_nonnull(msg);
        ck_assert_uint_eq(msg->cmd.kind, CMD_CANCEL);
        ck_assert_uint_eq(msg->cmd.number, 2);
        ck_assert_uint_eq(msg->cmd.target, 1);
    }
    fg_done(&g, 0, 1, LK_OK, "", ""); /* late: ignored */
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(o.calls, 1);
}
END_TEST

/* The last answer comes with the deadline, before the loop has looked at the clock: that rank was
 * late, too, and has ended no requests. */
START_TEST(test_a_pause_answered_at_its_deadline_is_rolled_back)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_ABORT, true, 2 * LK_SECOND_NS, on_result, &o);
    for (uint32_t r = 0; r < 2; r++) {
        const msg_t *msg = fg_take(&g, r, MSG_CMD);
        ck_assert(msg != NULL && msg->cmd.kind == CMD_PAUSE);
        ck_assert_uint_eq(msg->cmd.deadline_ns, g.now + 2 * LK_SECOND_NS);
        fg_seen(&g, r, 1);
    }
    fg_done(&g, 0, 1, LK_OK, "", "");
    g.now += 2 * LK_SECOND_NS;
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(o.status, LK_ERR_TIMEOUT);
    ck_assert_msg(strstr(o.text,
                         "rank 1 did not finish; the pause is rolled back; ranks that agreed "
                         "to it in time have ended their requests") != NULL,
                  "%s", o.text);
}
END_TEST

START_TEST(test_wait_has_no_deadline)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_WAIT, true, 0, on_result, &o);
    fg_seen(&g, 0, 1);
    fg_seen(&g, 1, 1);
    fg_advance(&g, 100000 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 0);
    /* an answer may have been lost: the ranks are asked again now and then */
    ck_assert_uint_ge(fg_count(&g, 0, MSG_CMD), 2);
    fg_done(&g, 0, 1, LK_OK, "", "");
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(o.calls, 1);
}
END_TEST

START_TEST(test_resume_deadline_stays_in_the_stream)
{
    outcome_t o = {0};
    engine_client_resume(g.client, 0, on_result, &o);
    fg_seen(&g, 0, 1);
    fg_done(&g, 0, 1, LK_OK, "", "");
    fg_drop_all(&g);
    fg_advance(&g, 30 * LK_SECOND_NS);
    ck_assert_int_eq(o.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(o.text, "resume was not completed within 30 s: rank 1 did not receive it; it "
                             "takes effect when they do");
    expect_cmd(1, 1, CMD_RESUME);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
    fg_seen(&g, 1, 1);
    fg_drop_all(&g);
    fg_advance(&g, 60 * LK_SECOND_NS);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_CMD), 0);
}
END_TEST

START_TEST(test_resend_keeps_order)
{
    outcome_t o[3] = {0};
    g.queues[1].down = true;
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &o[0]);
    engine_client_resume(g.client, 0, on_result, &o[1]);
    ck_assert_uint_eq(g.queues[1].n, 0);
    g.queues[1].down = false;
    fg_advance(&g, 100 * LK_MS_NS);
    expect_cmd(1, 1, CMD_PAUSE);
    expect_cmd(1, 2, CMD_RESUME);
    /* sent but lost: again after a second, from the first that was not acknowledged */
    fg_seen(&g, 1, 1);
    fg_seen(&g, 0, 2);
    fg_drop_all(&g);
    fg_advance(&g, 999 * LK_MS_NS);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_CMD), 0);
    fg_advance(&g, 1 * LK_MS_NS);
    ck_assert_uint_eq(fg_count(&g, 1, MSG_CMD), 1);
    expect_cmd(1, 2, CMD_RESUME);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
    /* a reconnect sends at once */
    msg_t here = {.type = MSG_ENGINE_HERE};
    here.engine_here = (msg_engine_here_t){1, 5, 1};
    engine_client_on_msg(g.client, &here);
    expect_cmd(1, 2, CMD_RESUME);
    /* an engine that repeats an old SEEN misses something */
    fg_advance(&g, 200 * LK_MS_NS);
    fg_seen(&g, 1, 1);
    expect_cmd(1, 2, CMD_RESUME);
}
END_TEST

START_TEST(test_superseded)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &o);
    fg_done(&g, 0, 1, LK_ERR_CANCELED, "superseded", "");
    fg_done(&g, 1, 1, LK_ERR_CANCELED, "superseded", "");
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(lk_status_http(o.status), 409);
    ck_assert_str_eq(o.text, "superseded");
}
END_TEST

START_TEST(test_update_is_exclusive)
{
    outcome_t start = {0}, pause = {0}, update = {0};
    engine_client_update(g.client, UPDATE_VERB_START, TEXT("{}"), 0, on_result, &start);
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{\"update_info\":{}}"), 0, on_result,
                         &update);
    expect_cmd(0, 1, CMD_UPDATE);
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
    fg_done(&g, 0, 1, LK_OK, "", "{\"a\":1}");
    ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(start.calls, 1);
    ck_assert_str_eq(start.bodies[0], "{\"a\":1}");
    expect_cmd(0, 2, CMD_PAUSE);
    const msg_t *msg = fg_take(&g, 0, MSG_CMD);
    ck_assert_uint_eq(msg->cmd.verb, UPDATE_VERB_UPDATE);
    ck_assert_str_eq(msg_cstr(msg->cmd.spec), "{\"update_info\":{}}");
    ck_assert_int_eq(update.calls, 0);
}
END_TEST

/* With shadow swap update_weights and finish_weight_update run beside the steps: pauses pass them,
 * weight calls do not. */
START_TEST(test_pauses_pass_a_shadow_update)
{
    static const update_verb_t verbs[] = {UPDATE_VERB_UPDATE, UPDATE_VERB_FINISH,
                                          UPDATE_VERB_START};
    for (size_t v = 0; v < LK_ARRAY_LEN(verbs); v++) {
        outcome_t update = {0}, pause = {0}, resume = {0}, next = {0};
        g.config.shadow = true;
        fg_drop_all(&g);
        fg_reopen(&g);
        engine_client_update(g.client, verbs[v], TEXT("{}"), 0, on_result, &update);
        engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &pause);
        engine_client_resume(g.client, 0, on_result, &resume);
        engine_client_update(g.client, UPDATE_VERB_FINISH, TEXT("{}"), 0, on_result, &next);
        expect_cmd(0, 1, CMD_UPDATE);
        if (verbs[v] != UPDATE_VERB_START) {
            expect_cmd(0, 2, CMD_PAUSE);
            expect_cmd(0, 3, CMD_RESUME);
        }
        ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), 0);
        fg_done(&g, 0, 1, LK_OK, "", "");
        fg_done(&g, 1, 1, LK_OK, "", "");
        ck_assert_int_eq(update.calls, 1);
        ck_assert_uint_eq(fg_count(&g, 0, MSG_CMD), verbs[v] != UPDATE_VERB_START ? 1 : 3);
    }
}
END_TEST

START_TEST(test_update_refused_by_one)
{
    outcome_t o = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 0, on_result, &o);
    fg_done(&g, 0, 1, LK_ERR_INVALID, "", "");
    fg_done(&g, 1, 1, LK_ERR_INVALID, "unknown tensor foo", "");
    ck_assert_int_eq(o.status, LK_ERR_INVALID);
    ck_assert_str_eq(o.text, "rank 1: unknown tensor foo");
    outcome_t same = {0};
    const char *text = "start_weight_update must be called before update_weights.";
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 0, on_result, &same);
    fg_done(&g, 0, 2, LK_ERR_STATE, text, "");
    fg_done(&g, 1, 2, LK_ERR_STATE, text, "");
    ck_assert_str_eq(same.text, text);
    outcome_t differ = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 0, on_result, &differ);
    fg_done(&g, 0, 3, LK_OK, "", "");
    fg_done(&g, 1, 3, LK_ERR_STATE, "x", "");
    ck_assert_int_eq(differ.status, LK_ERR_INTERNAL);
    ck_assert_str_eq(differ.text,
                     "the ranks disagree about the outcome: rank 0: OK; rank 1: ERR_STATE x");
}
END_TEST

START_TEST(test_update_deadline)
{
    outcome_t o = {0}, next = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 5 * LK_SECOND_NS, on_result, &o);
    engine_client_resume(g.client, ENGINE_CLIENT_NO_DEADLINE, on_result, &next);
    fg_seen(&g, 0, 1);
    fg_seen(&g, 1, 1);
    fg_drop_all(&g);
    fg_advance(&g, 5 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 0); /* the ranks are told first, then say how it ended */
    const msg_t *msg = fg_take(&g, 1, MSG_CANCEL_UPDATE);
    ck_assert_ptr_nonnull(msg);
    ck_assert_uint_eq(msg->cancel_update.number, 1);
    fg_drop_all(&g);
    fg_done(&g, 0, 1, LK_ERR_CANCELED, "cancelled", "");
    fg_done(&g, 1, 1, LK_ERR_CANCELED, "cancelled", "");
    ck_assert_int_eq(o.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(o.text, "update_weights was not completed within 5 s: ranks 0, 1 did not "
                             "finish; cancelled");
    expect_cmd(0, 2, CMD_RESUME);
}
END_TEST

START_TEST(test_update_deadline_without_answers)
{
    outcome_t o = {0}, queued = {0};
    engine_client_update(g.client, UPDATE_VERB_START, TEXT(""), 5 * LK_SECOND_NS, on_result, &o);
    engine_client_pause(g.client, PAUSE_KEEP, true, 7 * LK_SECOND_NS, on_result, &queued);
    fg_advance(&g, 5 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 0);
    fg_advance(&g, 2 * LK_SECOND_NS);
    ck_assert_int_eq(queued.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(queued.text, "pause was not completed within 7 s: it was not sent, because an "
                                  "earlier weight call is not over");
    fg_advance(&g, 28 * LK_SECOND_NS);
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(o.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(o.text, "start_weight_update was not completed within 5 s: ranks 0, 1 did not "
                             "receive it");
    ck_assert_int_eq(queued.calls, 1);
}
END_TEST

/* A rank that never answers an UPDATE holds up its stream; what waits behind it has a deadline all
 * the same, whether it came before the UPDATE's last deadline or after it. */
START_TEST(test_update_behind_one_without_answers)
{
    outcome_t stuck = {0}, early = {0}, late = {0}, next = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 5 * LK_SECOND_NS, on_result,
                         &stuck);
    engine_client_update(g.client, UPDATE_VERB_ABORT, TEXT(""), 0, on_result, &early);
    fg_advance(&g, 5 * LK_SECOND_NS);
    fg_advance(&g, 30 * LK_SECOND_NS);
    ck_assert_int_eq(stuck.status, LK_ERR_TIMEOUT);
    ck_assert_int_eq(early.calls, 0);
    fg_advance(&g, 10 * LK_SECOND_NS);
    engine_client_update(g.client, UPDATE_VERB_FINISH, TEXT(""), 0, on_result, &late);
    fg_advance(&g, 20 * LK_SECOND_NS);
    ck_assert_int_eq(early.calls, 1);
    ck_assert_int_eq(early.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(early.text, "abort_weight_update was not completed within 30 s: it was not "
                                 "sent, because an earlier weight call is not over");
    ck_assert_int_eq(late.calls, 0);
    fg_advance(&g, 10 * LK_SECOND_NS);
    ck_assert_int_eq(late.calls, 1);
    ck_assert_int_eq(late.status, LK_ERR_TIMEOUT);
    /* the answers come after all: the stream goes on, without those two */
    fg_drop_all(&g);
    fg_done(&g, 0, 1, LK_ERR_CANCELED, "", "");
    fg_done(&g, 1, 1, LK_ERR_CANCELED, "", "");
    ck_assert_int_eq(stuck.calls, 1);
    engine_client_update(g.client, UPDATE_VERB_ABORT, TEXT(""), 0, on_result, &next);
    expect_cmd(0, 2, CMD_UPDATE);
    ck_assert_int_eq(early.calls + late.calls, 2);
}
END_TEST

START_TEST(test_transfer_must_be_received_in_time)
{
    outcome_t o = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 0, on_result, &o);
    fg_seen(&g, 0, 1);
    fg_advance(&g, 30 * LK_SECOND_NS); /* the control timeout; the transfer's is 300 s */
    const msg_t *msg = fg_take(&g, 0, MSG_CANCEL_UPDATE);
    ck_assert_ptr_nonnull(msg);
    ck_assert_str_eq(msg_cstr(msg->cancel_update.why),
                     "update_weights was not completed within 30 s: rank 1 did not receive it; "
                     "rank 0 did not finish");
}
END_TEST

START_TEST(test_abort_weight_update)
{
    outcome_t update = {0}, abort = {0};
    engine_client_update(g.client, UPDATE_VERB_UPDATE, TEXT("{}"), 0, on_result, &update);
    engine_client_update(g.client, UPDATE_VERB_ABORT, TEXT(""), 0, on_result, &abort);
    expect_cmd(0, 1, CMD_UPDATE);
    const msg_t *msg = fg_take(&g, 0, MSG_CANCEL_UPDATE);
    ck_assert_ptr_nonnull(msg);
    ck_assert_uint_eq(msg->cancel_update.number, 0);
    fg_done(&g, 0, 1, LK_ERR_CANCELED, "aborted", "");
    fg_done(&g, 1, 1, LK_ERR_CANCELED, "aborted", "");
    ck_assert_int_eq(update.status, LK_ERR_CANCELED);
    expect_cmd(0, 2, CMD_UPDATE);
    fg_done(&g, 0, 2, LK_OK, "", "");
    fg_done(&g, 1, 2, LK_OK, "", "");
    ck_assert_int_eq(abort.status, LK_OK);
}
END_TEST

START_TEST(test_new_group_epoch)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &o);
    uint64_t old = g.generation;
    fg_stats(&g, true, false, 2, NULL);
    ck_assert_int_eq(o.status, LK_ERR_UNAVAILABLE);
    outcome_t again = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &again);
    ck_assert_int_eq(again.calls, 1); /* not before every rank is in it */
    ck_assert_int_eq(again.status, LK_ERR_UNAVAILABLE);
    fg_here(&g, 0, 1, 2);
    fg_here(&g, 1, 1, 2);
    again = (outcome_t){0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &again);
    ck_assert_uint_eq(g.generation, old + 1);
    /* an answer of the old generation means nothing */
    g.generation = old;
    fg_done(&g, 0, 1, LK_OK, "", "");
    fg_done(&g, 1, 1, LK_OK, "", "");
    ck_assert_int_eq(again.calls, 0);
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(info.dropped, 2);
}
END_TEST

START_TEST(test_nonsense_is_dropped)
{
    outcome_t o = {0};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, on_result, &o);
    fg_seen(&g, 0, 2);                /* never sent */
    fg_done(&g, 1, 9, LK_OK, "", ""); /* never sent */
    fg_done(&g, 7, 1, LK_OK, "", ""); /* no such rank */
    fg_seen(&g, 2, 1);
    fg_done(&g, 0, 1, (lk_status_t)-99, "", "");
    fg_output(&g, 9, 1, 0, 1, FINISH_NONE);
    msg_t msg = {.type = MSG_HELLO};
    engine_client_on_msg(g.client, &msg);
    engine_client_info_t info;
    engine_client_info(g.client, &info);
    ck_assert_uint_eq(info.dropped, 7);
    ck_assert_int_eq(o.calls, 0);
}
END_TEST

START_TEST(test_utility)
{
    outcome_t o = {0}, late = {0};
    engine_client_utility(g.client, "is_paused", "", 0, on_result, &o);
    uint64_t id = fg_take(&g, 0, MSG_UTILITY)->utility.call_id;
    ck_assert_uint_eq(fg_take(&g, 1, MSG_UTILITY)->utility.call_id, id);
    msg_t msg = {.type = MSG_UTILITY_REPLY};
    for (uint64_t r = 0; r < 2; r++) {
        msg.utility_reply = (msg_utility_reply_t){r, id, LK_OK, msg_str(""), msg_str("{}")};
        engine_client_on_msg(g.client, &msg);
    }
    ck_assert_int_eq(o.calls, 1);
    ck_assert_int_eq(o.status, LK_OK);
    engine_client_utility(g.client, "weight_info", "", 0, on_result, &late);
    fg_advance(&g, 30 * LK_SECOND_NS);
    ck_assert_int_eq(late.status, LK_ERR_TIMEOUT);
    ck_assert_str_eq(late.text, "rank 0: weight_info got no answer within 30 s");
}
END_TEST

typedef struct {
    outcome_t outcome;
    int left;
} chain_t;

static void call_again(void *ctx, const engine_result_t *result)
{
    chain_t *c = ctx;
    on_result(&c->outcome, result);
    if (c->left-- > 0) {
        engine_client_update(g.client, UPDATE_VERB_START, TEXT(""), 0, call_again, c);
    }
}

START_TEST(test_callback_may_call)
{
    chain_t c = {.left = 3};
    engine_client_pause(g.client, PAUSE_KEEP, true, 0, call_again, &c);
    for (uint64_t n = 1; n <= 4; n++) {
        ck_assert_int_eq(c.outcome.calls, (int)n - 1);
        fg_done(&g, 0, n, LK_OK, "", "");
        fg_done(&g, 1, n, LK_OK, "", "");
    }
    ck_assert_int_eq(c.outcome.calls, 4);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("engine_client");
    TCase *tc = tcase_create("engine_client");
    tcase_add_checked_fixture(tc, setup2, teardown);
    tcase_add_test(tc, test_facts_outlive_a_coordinator);
    tcase_add_test(tc, test_request_outputs);
    tcase_add_test(tc, test_running_group_gets_no_hint);
    tcase_add_test(tc, test_abort);
    tcase_add_test(tc, test_unreachable_and_limit);
    tcase_add_test(tc, test_many_requests);
    tcase_add_test(tc, test_lost_outputs);
    tcase_add_test(tc, test_lost_inputs);
    tcase_add_test(tc, test_where_numbers_begin);
    tcase_add_test(tc, test_dead_engine_dense);
    tcase_add_test(tc, test_dead_engine_expert_parallel);
    tcase_add_test(tc, test_left_dense);
    tcase_add_test(tc, test_here_comes_before_left);
    tcase_add_test(tc, test_left_lockstep);
    tcase_add_test(tc, test_replaced_rank);
    tcase_add_test(tc, test_pause_needs_every_rank);
    tcase_add_test(tc, test_pause_deadline_names_ranks_and_rolls_back);
    tcase_add_test(tc, test_a_pause_answered_at_its_deadline_is_rolled_back);
    tcase_add_test(tc, test_wait_has_no_deadline);
    tcase_add_test(tc, test_resume_deadline_stays_in_the_stream);
    tcase_add_test(tc, test_resend_keeps_order);
    tcase_add_test(tc, test_superseded);
    tcase_add_test(tc, test_update_is_exclusive);
    tcase_add_test(tc, test_pauses_pass_a_shadow_update);
    tcase_add_test(tc, test_update_refused_by_one);
    tcase_add_test(tc, test_update_deadline);
    tcase_add_test(tc, test_update_deadline_without_answers);
    tcase_add_test(tc, test_update_behind_one_without_answers);
    tcase_add_test(tc, test_transfer_must_be_received_in_time);
    tcase_add_test(tc, test_abort_weight_update);
    tcase_add_test(tc, test_new_group_epoch);
    tcase_add_test(tc, test_nonsense_is_dropped);
    tcase_add_test(tc, test_utility);
    tcase_add_test(tc, test_callback_may_call);
    TCase *three = tcase_create("removal");
    tcase_add_checked_fixture(three, setup3, teardown);
    tcase_add_test(three, test_removed_rank);
    tcase_add_test(three, test_removed_before_it_came);
    suite_add_tcase(suite, three);
    suite_add_tcase(suite, tc);
    return suite;
}
