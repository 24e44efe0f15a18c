/* scenes_pause.c: scenarios about pause, resume and weight calls; scenarios.def says what each is
 * for. */
#include "tests/sim/scene.h"

#include <string.h>

bool scene_stopped_engine(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_stop(sim, sim_node_rank(sim, 1), 1800);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT(!scene->c[0]->open);
    EXPECT(scene->c[0]->status == LK_ERR_TIMEOUT);
    EXPECT(strstr(scene->c[0]->text, "rank 1 did not receive it") != NULL);
    EXPECT(sim->now_ns - scene->since_ns < 1500 * LK_MS_NS);
    AWAIT_MS(3000);
    EXPECT(!pause_is_paused(group_pause(scene_group(sim, 0))));
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

/* ---- a pause and what is under way ---- */

bool scene_stale_start_after_pause(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_delay_start(sim, 0, 300);
    scene_delay_start(sim, 1, 400);
    scene->r[0] = scene_request(sim, 0, 0, 4, 4);
    AWAIT(scene_ended(scene->r[0]));
    scene->c[0] = scene_pause(sim, 0, PAUSE_ABORT, true);
    AWAIT(scene_ok(scene->c[0]));
    EXPECT(scene->sent[MSG_START_DP_WAVE] > 0);
    scene->n[0] = scene_steps(sim);
    AWAIT_MS(1000);
    EXPECT(scene_steps(sim) == scene->n[0]);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    SCENE_END;
}

bool scene_pause_reaches_one_rank(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 1, 1, 4, 190);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene_delay_to_rank(sim, 0, 1, 100);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    scene->n[0] = scene_tokens(scene->r[0]);
    AWAIT_MS(80);
    EXPECT(scene->sent[MSG_SEEN] > 0);
    EXPECT(scene->c[0]->open);
    EXPECT(scene_tokens(scene->r[0]) > scene->n[0] + 5);
    AWAIT(scene_ok(scene->c[0]));
    EXPECT(!scene_ended(scene->r[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_request_slips_in(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 12; scene->i++) {
        scene_delay_to_rank(sim, 0, 1, 20);
        scene->c[0] = scene_pause(sim, 0, scene->i % 2 == 0 ? PAUSE_KEEP : PAUSE_WAIT, true);
        AWAIT(sim->now_ns - scene->since_ns >= scene->i * 2 * LK_MS_NS);
        scene->r[scene->i] = scene_request(sim, 1, scene->i / 2 % 2, 4, 6);
        AWAIT(scene_ok(scene->c[0]));
        scene->n[0] = scene_steps(sim);
        AWAIT_MS(30);
        EXPECT(scene_steps(sim) == scene->n[0]);
        scene->c[1] = scene_resume(sim, 0);
        AWAIT(scene_ok(scene->c[1]));
        AWAIT(scene_ended(scene->r[scene->i]));
    }
    EXPECT(scene_all_are(scene, 12, FINISH_LENGTH));
    SCENE_END;
}

bool scene_pause_of_an_idle_group(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 6; scene->i++) {
        AWAIT(scene_all_idle(sim));
        scene->n[0] = group_round(scene_group(sim, 0));
        scene->n[1] = scene_steps(sim);
        scene->c[0] =
            scene_pause(sim, 0, PAUSE_ABORT + (pause_mode_t)(scene->i % 3), scene->i % 2 == 0);
        AWAIT(scene_ok(scene->c[0]));
        scene->n[2] = group_round(scene_group(sim, 0));
        /* two rounds if a rank has to vote for its peer's news before it has them itself */
        EXPECT(scene->n[2] == scene->n[0] + 1 || scene->n[2] == scene->n[0] + 2);
        EXPECT(scene_steps(sim) == scene->n[1]);
        scene->c[1] = scene_resume(sim, 0);
        AWAIT(scene_ok(scene->c[1]));
        EXPECT(group_round(scene_group(sim, 0)) <= scene->n[2] + 2);
        EXPECT(scene_steps(sim) == scene->n[1]);
    }
    SCENE_END;
}

bool scene_resume_twice(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 16; scene->i++) {
        scene->c[0] = scene_pause(sim, scene->i % 2, PAUSE_KEEP, true);
        AWAIT(scene_ok(scene->c[0]));
        scene_delay_to_rank(sim, 1, scene->i % 2, scene->i / 2);
        scene->c[1] = scene_resume(sim, 0);
        scene->c[2] = scene_resume(sim, 1);
        scene->r[scene->i] = scene_request(sim, scene->i / 4 % 2, scene->i / 2 % 2, 4, 8);
        AWAIT(scene_ok(scene->c[1]) && scene_ok(scene->c[2]));
        AWAIT(scene_ended(scene->r[scene->i]));
        EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    }
    EXPECT(scene_all_are(scene, 16, FINISH_LENGTH));
    SCENE_END;
}

bool scene_idle_device(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 1, 4, 190);
    for (scene->i = 0; scene->i < 8; scene->i++) {
        AWAIT(sim->now_ns - scene->since_ns >= (70 + scene->i * 7) * LK_MS_NS);
        scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
        AWAIT(scene_ok(scene->c[0]));
        EXPECT(!scene->in_step[0] && !scene->in_step[1]);
        scene->c[1] = scene_resume(sim, 0);
        AWAIT(scene_ok(scene->c[1]));
    }
    EXPECT(!scene_ended(scene->r[0]));
    SCENE_END;
}

/* ---- pauses that do not come about ---- */

static const sim_call_t *pause_within(sim_t *sim, pause_mode_t mode, uint64_t ms)
{
    return sim_call(sim, 0, SIM_CALL_PAUSE, mode, true, NULL, ms * LK_MS_NS, NULL, NULL);
}

bool scene_partial_pause(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    AWAIT_MS(200);
    scene_delay_to_rank(sim, 0, 1, 2000);
    scene->n[0] = group_round(scene_group(sim, 0));
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT_MS(1500);
    EXPECT(scene->c[0]->open);
    EXPECT(group_round(scene_group(sim, 0)) <= scene->n[0] + 1);
    AWAIT(scene_ok(scene->c[0]));
    EXPECT(group_round(scene_group(sim, 0)) <= scene->n[0] + 2);
    EXPECT(scene_steps(sim) == 0);
    SCENE_END;
}

bool scene_deadline_rolls_back(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 190);
    scene->r[1] = scene_request(sim, 0, 1, 4, 190);
    AWAIT(scene_tokens(scene->r[0]) > 3 && scene_tokens(scene->r[1]) > 3);
    scene_delay_to_rank(sim, 0, 1, 200);
    scene->c[0] = pause_within(sim, PAUSE_ABORT, 50);
    AWAIT(!scene->c[0]->open);
    EXPECT(scene->c[0]->status == LK_ERR_TIMEOUT);
    EXPECT(!scene_ended(scene->r[0]) && !scene_ended(scene->r[1]));
    AWAIT(scene_all_ended(scene, 2));
    EXPECT(scene_all_are(scene, 2, FINISH_LENGTH));
    EXPECT(!pause_is_paused(group_pause(scene_group(sim, 0))));
    SCENE_END;
}

bool scene_deadline_spares_another(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->c[0] = scene_pause(sim, 1, PAUSE_KEEP, false);
    AWAIT(scene_ok(scene->c[0]));
    scene_delay_to_rank(sim, 0, 1, 300);
    scene->c[1] = pause_within(sim, PAUSE_KEEP, 100);
    AWAIT(!scene->c[1]->open);
    EXPECT(scene->c[1]->status == LK_ERR_TIMEOUT);
    scene->r[0] = scene_request(sim, 1, 1, 4, 4);
    AWAIT_MS(1000);
    EXPECT(pause_is_paused(group_pause(scene_group(sim, 0))));
    EXPECT(scene_steps(sim) == 0);
    scene->c[2] = scene_resume(sim, 1);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_superseded(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 1, 4, 190);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene->c[0] = scene_pause(sim, 0, PAUSE_WAIT, false);
    AWAIT(pause_is_paused(group_pause(scene_group(sim, 0))));
    scene->r[1] = scene_request(sim, 0, 0, 4, 4);
    scene->c[1] = scene_resume(sim, 1);
    AWAIT(scene_ok(scene->c[1]) && !scene->c[0]->open);
    EXPECT(scene->c[0]->status == LK_ERR_CANCELED);
    EXPECT(!scene_ended(scene->r[0]));
    AWAIT(scene_all_ended(scene, 2));
    EXPECT(scene_all_are(scene, 2, FINISH_LENGTH));
    SCENE_END;
}

/* A RESUME of front end 0, as every rank would get it. */
static void resume_from(sim_t *sim, uint64_t generation, uint64_t number, uint64_t group_epoch)
{
    msg_t msg = {.type = MSG_CMD, .generation = generation};
    msg.cmd = (msg_cmd_t){
        .generation = generation, .number = number, .kind = CMD_RESUME, .group_epoch = group_epoch};
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        engine_core_on_message(sim->ranks[r].core, 0, &msg);
        sim_rank_wake(&sim->ranks[r], sim->now_ns);
    }
}

static void done_from(sim_t *sim, uint32_t rank, uint64_t generation, uint64_t number)
{
    msg_t msg = {.type = MSG_DONE, .sender_rank = rank, .generation = 1};
    msg.done = (msg_done_t){.rank = rank, .generation = generation, .number = number};
    engine_client_on_msg(sim->fronts[0].client, &msg);
}

bool scene_old_life(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->n[0] = sim->fronts[0].generation;
    scene->n[1] = sim->ranks[0].enrol.epoch;
    scene->r[0] = scene_request(sim, 0, 0, 4, 60);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->n[2] = scene_steps(sim);
    resume_from(sim, scene->n[0] - 1, 1, scene->n[1]);
    resume_from(sim, scene->n[0] - 1, 2, scene->n[1]);
    resume_from(sim, scene->n[0], 2, scene->n[1] + 1);
    AWAIT_MS(200);
    EXPECT(pause_is_paused(group_pause(scene_group(sim, 0))));
    EXPECT(scene_steps(sim) == scene->n[2]);
    scene_delay_to_rank(sim, 0, 1, 100);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT_MS(20);
    done_from(sim, 0, scene->n[0] - 1, 2);
    done_from(sim, 1, scene->n[0] - 1, 2);
    EXPECT(scene->c[1]->open);
    AWAIT(scene_ok(scene->c[1]));
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}

/* ---- requests and modes ---- */

bool scene_queued_while_paused(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(engine_client_load(sim->fronts[0].client, 1) != NULL &&
          engine_client_load(sim->fronts[0].client, 1)->waiting == 1);
    scene->n[0] = group_weights(scene_group(sim, 1))->epoch;
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    EXPECT(scene_tokens(scene->r[0]) == 0);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    EXPECT(scene->r[0]->epochs[0] == scene->n[0] + 1);
    SCENE_END;
}

bool scene_refused_while_paused(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->c[0] = scene_pause(sim, 0, PAUSE_ABORT, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(sim->now_ns - scene->since_ns < 10 * LK_MS_NS);
    EXPECT(scene->r[0]->finish == FINISH_ERROR && scene->r[0]->status == LK_ERR_UNAVAILABLE);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    scene->r[1] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(scene_ended(scene->r[1]));
    EXPECT(scene->r[1]->finish == FINISH_LENGTH);
    SCENE_END;
}

static bool keep(sim_t *sim, sim_scene_t *scene, bool clear_cache)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 40);
    AWAIT(scene_tokens(scene->r[0]) > 5);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, clear_cache);
    AWAIT(scene_ok(scene->c[0]));
    EXPECT(!scene_ended(scene->r[0]));
    scene->n[0] = scene->fresh[0];
    scene->n[1] = scene_tokens(scene->r[0]);
    AWAIT_MS(100);
    EXPECT(scene_tokens(scene->r[0]) <= scene->n[1] + 1); /* one that was under way */
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    EXPECT(scene->fresh[0] == scene->n[0] + clear_cache);
    SCENE_END;
}

bool scene_keep_recomputes(sim_t *sim, sim_scene_t *scene)
{
    return keep(sim, scene, true);
}

bool scene_keep_keeps(sim_t *sim, sim_scene_t *scene)
{
    return keep(sim, scene, false);
}

bool scene_abort_tells_everybody(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 16; scene->i++) {
        scene->r[scene->i] = scene_request(sim, scene->i % 2, scene->i / 2 % 2, 4, 60);
    }
    AWAIT(scene->posted[0] > 10 && scene->posted[1] > 10);
    EXPECT(scheduler_num_waiting(engine_core_scheduler(sim->ranks[0].core)) == 6);
    EXPECT(scheduler_num_running(engine_core_scheduler(sim->ranks[1].core)) == 2);
    scene->c[0] = scene_pause(sim, 0, PAUSE_ABORT, true);
    AWAIT(scene_ok(scene->c[0]));
    AWAIT(scene_all_ended(scene, 16));
    EXPECT(sim->now_ns - scene->since_ns < LK_MS_NS);
    EXPECT(scene_all_are(scene, 16, FINISH_ABORT));
    SCENE_END;
}

bool scene_wait_drains(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 60);
    AWAIT(scene_tokens(scene->r[0]) > 2);
    scene->c[0] = scene_pause(sim, 0, PAUSE_WAIT, true);
    AWAIT(pause_is_paused(group_pause(scene_group(sim, 0))));
    scene->r[1] = scene_request(sim, 0, 0, 4, 8); /* is not let in any more */
    EXPECT(scene->c[0]->open);
    AWAIT(!scene->c[0]->open);
    EXPECT(scene_ok(scene->c[0]) && scene_tokens(scene->r[1]) == 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH && sim->now_ns - scene->since_ns < LK_MS_NS);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[1]));
    EXPECT(scene->r[1]->finish == FINISH_LENGTH);
    SCENE_END;
}

/* ---- weight calls ---- */

bool scene_late_start_in_an_update(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_delay_start(sim, 1, 40);
    scene->r[0] = scene_request(sim, 0, 0, 4, 4); /* FIRST_REQ, and START on its way to rank 1 */
    AWAIT(scene->sent[MSG_START_DP_WAVE] > 0);
    scene->c[0] = scene_pause(sim, 0, PAUSE_ABORT, true);
    AWAIT(scene_ok(scene->c[0]));
    scene_delay_to_rank(sim, 0, 0, 60); /* so that rank 1 waits for rank 0 in the broadcast */
    scene->n[0] = scene_steps(sim);
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    EXPECT(scene->entered[0] > 0 && scene->entered[0] == scene->entered[1]);
    EXPECT(scene_steps(sim) == scene->n[0]);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    SCENE_END;
}

bool scene_update_of_a_running_group(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 5; scene->i++) {
        scene_delay_start(sim, scene->i % 2, 5 * scene->i);
        scene->r[0] = scene_request(sim, 0, scene->i % 2, 4, 120);
        AWAIT(scene->i < 2 || scene_tokens(scene->r[0]) > 3);
        scene->n[0] = group_weights(scene_group(sim, 0))->epoch;
        scene_session(sim);
        AWAIT(scene->session_over);
        EXPECT(scene->session == LK_OK);
        AWAIT(scene_ended(scene->r[0]));
        EXPECT(scene->r[0]->finish == FINISH_LENGTH);
        EXPECT(scene->i < 2 || scene->r[0]->epochs[0] == scene->n[0]);
        EXPECT(sim->o.swap == 1 || scene->r[0]->epochs[119] == scene->n[0] + 1);
        AWAIT(scene_all_idle(sim));
    }
    EXPECT(group_weights(scene_group(sim, 0))->epoch >= 5);
    SCENE_END;
}

/*
 * Of a session through front end 0 START has been answered. Rank 0 gets a request (of front end 1)
 * at once, the UPDATE late; rank 1 the pause and the UPDATE at once, the START of the new wave
 * late.
 */
bool scene_dp2_deadlock(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_session(sim);
    AWAIT(scene->sent[MSG_DONE] >= 4); /* of init and start, by both ranks */
    scene_delay_to_rank(sim, 0, 0, 20);
    scene_delay_start(sim, 1, 50);
    scene->r[0] = scene_request(sim, 1, 0, 4, 8);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    AWAIT(!scene->c[0]->open);
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}
