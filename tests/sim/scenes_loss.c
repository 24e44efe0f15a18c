/* scenes_loss.c: scenarios about messages that are lost and processes that die; scenarios.def says
 * what each is for. */
#include "tests/sim/scene.h"

/* ---- a connection breaks ---- */

bool scene_lost_request(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[1] = scene_request(sim, 0, 0, 4, 64);
    scene_lose(sim, MSG_ADD, sim_node_front(sim, 0), sim_node_rank(sim, 1));
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene_is_retryable(scene->r[0]));
    EXPECT(sim->now_ns - scene->since_ns < 2 * LK_SECOND_NS);
    scene->r[2] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(scene_all_ended(scene, 3));
    EXPECT(scene->r[1]->finish == FINISH_LENGTH && scene->r[2]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_lost_output(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 1, 4, 64);
    scene->r[1] = scene_request(sim, 0, 0, 4, 64);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene_lose(sim, MSG_OUTPUTS, sim_node_rank(sim, 1), sim_node_front(sim, 0));
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene_is_retryable(scene->r[0]));
    EXPECT(scene_tokens(scene->r[0]) < 64);
    AWAIT(scheduler_num_running(engine_core_scheduler(sim->ranks[1].core)) == 0);
    AWAIT(scene_ended(scene->r[1]));
    EXPECT(scene->r[1]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_lost_end(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    AWAIT(scene_tokens(scene->r[0]) == 7);
    scene_lose(sim, MSG_OUTPUTS, sim_node_rank(sim, 1), sim_node_front(sim, 0));
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene_is_retryable(scene->r[0]));
    EXPECT(sim->now_ns - scene->since_ns < 2 * LK_SECOND_NS);
    SCENE_END;
}

/* One by one: the front end has at most one of them open. */
bool scene_lost_answer(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_lose(sim, MSG_DONE, sim_node_rank(sim, 1), sim_node_front(sim, 0));
    scene->r[0] = scene_request(sim, 0, 1, 4, 64); /* so that SEEN comes long before DONE */
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene->c[0] = scene_pause(sim, 0, PAUSE_WAIT, false);
    AWAIT(!scene->lose.due);
    for (scene->i = 0; scene->i < 200; scene->i++) {
        scene->c[1] = scene_resume(sim, 0);
        AWAIT(scene_ok(scene->c[1]));
    }
    EXPECT(scene_ok(scene->c[0]));
    SCENE_END;
}

bool scene_lost_ready(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_lose(sim, MSG_READY, sim_node_rank(sim, 0), sim_node_coord());
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 2));
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

/* It can't leave an epoch that it has never heard of, and is asked into the next one all the same.
 */
bool scene_lost_init(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_lose(sim, MSG_INIT, sim_node_coord(), sim_node_rank(sim, 0));
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(sim->ranks[2].enrol.epoch == 2);
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 3));
    SCENE_END;
}

bool scene_lost_here(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_lose(sim, MSG_ENGINE_HERE, sim_node_rank(sim, 0), sim_node_front(sim, 0));
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 2));
    SCENE_END;
}

/* ---- deaths ---- */

bool scene_two_updates_behind(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 2; scene->i++) {
        scene_session(sim);
        AWAIT(scene->session_over);
        EXPECT(scene->session == LK_OK);
    }
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 2));
    EXPECT(group_gates(scene_group(sim, 0)) & GATE_DIRTY);
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

bool scene_dense_goes_on(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 190);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 2));
    EXPECT(!scene_ended(scene->r[0]));
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT(scene_ok(scene->c[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_coordinator_dies_in_an_update(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_session(sim);
    AWAIT(group_weights(scene_group(sim, 0))->session);
    scene_kill(sim, sim_node_coord());
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    AWAIT(sim->coord.coordinator != NULL && coordinator_serving(sim->coord.coordinator));
    EXPECT(scene_is_whole(sim, 1));
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

bool scene_coordinator_dies_while_ranks_connect(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(sim->ranks[0].enrol.state == ENROL_CONNECTING);
    scene_kill(sim, sim_node_coord());
    AWAIT(sim->coord.coordinator != NULL && coordinator_serving(sim->coord.coordinator));
    AWAIT(sim_everybody_serves(sim));
    SCENE_END;
}

/* A rank with the checkpoint's weights must not generate with them while the others hold newer. */
bool scene_group_breaks_before_a_rank_joined(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(sim->ranks[1].core != NULL && !group_is_member(scene_group(sim, 1)));
    scene_kill(sim, sim_node_rank(sim, 2));
    scene->n[0] = scene->posted[1];
    AWAIT(scene_is_whole(sim, 3));
    EXPECT(scene->posted[1] == scene->n[0]);
    SCENE_END;
}

bool scene_all_ranks_die(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    AWAIT_MS(200);
    scene_kill(sim, sim_node_rank(sim, 0));
    scene_kill(sim, sim_node_rank(sim, 1));
    AWAIT(scene_is_whole(sim, 2));
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    EXPECT(group_weights(scene_group(sim, 0))->epoch > 2);
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

/* ---- ranks that do not come back ---- */

static bool transfers_everywhere(const sim_t *sim)
{
    bool all = true;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        all &= sim->removed[r] || sim->scene->entered[r] > 0;
    }
    return all;
}

bool scene_dense_rank_is_removed_in_an_update(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 1, 4, 190);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene_session(sim);
    AWAIT(transfers_everywhere(sim));
    scene_remove(sim, 1);
    AWAIT(scene->session_over);
    EXPECT(scene->session != LK_OK);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene_is_retryable(scene->r[0]));
    AWAIT(scene_is_whole(sim, 2));
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    scene->r[1] = scene_request(sim, 0, 0, 4, 8);
    scene->r[2] = scene_request(sim, 0, 2, 4, 8);
    AWAIT(scene_ended(scene->r[1]) && scene_ended(scene->r[2]));
    EXPECT(scene->r[1]->finish == FINISH_LENGTH && scene->r[2]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_moe_rank_is_removed_in_an_update(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    scene->n[0] = scene->entered[0];
    scene_session(sim);
    AWAIT(scene->entered[0] > scene->n[0]);
    scene_remove(sim, 0);
    AWAIT(scene->session_over);
    EXPECT(scene->session != LK_OK);
    AWAIT(scene_is_whole(sim, 2));
    EXPECT(group_gates(scene_group(sim, 1)) & GATE_DIRTY);
    EXPECT(group_held((group_t *)(uintptr_t)scene_group(sim, 2))->epoch == 0);
    scene_session(sim);
    AWAIT(scene->session_over);
    EXPECT(scene->session == LK_OK);
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    scene->r[1] = scene_request(sim, 0, 2, 4, 8);
    AWAIT(scene_ended(scene->r[0]) && scene_ended(scene->r[1]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH && scene->r[1]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_removed_down_to_one(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene_ok(scene->c[0]));
    for (scene->i = 0; scene->i < 3; scene->i++) {
        scene_remove(sim, scene->i);
        AWAIT(scene_is_whole(sim, 2 + scene->i));
        EXPECT(pause_is_paused(group_pause(scene_group(sim, 3))));
    }
    scene->r[0] = scene_request(sim, 0, -1, 4, 8);
    AWAIT_MS(100);
    EXPECT(!scene_ended(scene->r[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    SCENE_END;
}

bool scene_coordinator_dies_with_a_removed_rank(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_kill(sim, sim_node_coord());
    scene_remove(sim, 2);
    AWAIT(sim->coord.coordinator != NULL && coordinator_serving(sim->coord.coordinator));
    AWAIT(scene_is_whole(sim, 2));
    scene_kill(sim, sim_node_coord()); /* and once more, while the two serve */
    AWAIT(sim->coord.coordinator != NULL && coordinator_serving(sim->coord.coordinator));
    EXPECT(scene_is_whole(sim, 2));
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

bool scene_two_are_removed_while_ranks_connect(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_kill(sim, sim_node_rank(sim, 3));
    AWAIT(sim->ranks[0].enrol.state == ENROL_CONNECTING);
    scene_remove(sim, 1);
    AWAIT(sim->ranks[0].enrol.state == ENROL_CONNECTING && sim->ranks[0].enrol.epoch > 2);
    scene_remove(sim, 2);
    AWAIT(sim_everybody_serves(sim));
    EXPECT(sim->ranks[0].roster.n == 2 && sim->ranks[3].roster.place == 1);
    EXPECT_SERVED(0, 3, 4, 8);
    SCENE_END;
}
