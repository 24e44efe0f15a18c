/* scenes_wave.c: scenarios about waves, load and start; scenarios.def says what each is for. */
#include "tests/sim/scene.h"

bool scene_first_request_of_all(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    EXPECT(scene_steps(sim) == 0);
    EXPECT_SERVED(0, (int64_t)sim->o.ranks - 1, 4, 8);
    EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    SCENE_END;
}

bool scene_lost_starts(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 20; scene->i++) {
        EXPECT_SERVED(0, scene->i % 2, 3, 4);
        AWAIT(scene_all_idle(sim));
    }
    SCENE_END;
}

/* The next request is sent some time after the last token: before, while and after the wave ends.
 */
bool scene_requests_at_the_end_of_waves(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 60; scene->i++) {
        scene->r[scene->i] = scene_request(sim, 0, scene->i % 3, 2, 1 + scene->i % 5);
        AWAIT(scene_ended(scene->r[scene->i]));
        AWAIT(sim->now_ns - scene->since_ns >= scene->i * 97000ull);
    }
    EXPECT(scene_all_are(scene, 60, FINISH_LENGTH));
    EXPECT(group_wave(scene_group(sim, 0)) > 5);
    AWAIT(scene_all_idle(sim));
    AWAIT(!scene_front_says_run(sim, 0));
    SCENE_END;
}

bool scene_late_request(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 60);
    AWAIT(scene_tokens(scene->r[0]) > 4);
    scene->c[0] = scene_pause(sim, 0, PAUSE_ABORT, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->r[1] = scene_request(sim, 0, 1, 4, 8);
    scene->n[0] = scene_steps(sim);
    AWAIT_MS(1000);
    EXPECT(!scene_front_says_run(sim, 0));
    AWAIT_MS(4000);
    EXPECT(!scene_front_says_run(sim, 0));
    EXPECT(scene_steps(sim) == scene->n[0]);
    EXPECT(!scene_ended(scene->r[1]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    AWAIT(scene_ended(scene->r[1]));
    EXPECT(scene->r[0]->finish == FINISH_ABORT && scene->r[1]->finish == FINISH_LENGTH);
    AWAIT(scene_all_idle(sim));
    AWAIT(!scene_front_says_run(sim, 0));
    SCENE_END;
}

bool scene_lost_hint(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_delay(sim, SIM_LINK_EVENTS, sim_node_front(sim, 0), sim_node_coord(), 4000);
    scene->n[0] = scene->sent[MSG_FIRST_REQ];
    scene->r[0] = scene_request(sim, 0, 1, 4, 8);
    EXPECT(scene->sent[MSG_FIRST_REQ] == scene->n[0] + 1);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    AWAIT_MS(5000); /* and when it does come it does no harm */
    EXPECT(scene_all_idle(sim));
    SCENE_END;
}

bool scene_request_overtaken_by_resume(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_delay_to_rank(sim, 1, 1, 100);
    scene->r[0] = scene_request(sim, 1, 1, 4, 8);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    EXPECT(scene_tokens(scene->r[0]) == 0);
    EXPECT(scheduler_num_waiting(engine_core_scheduler(sim->ranks[1].core)) == 0);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    SCENE_END;
}

/* Work on the slow rank only, then on the fast ones only, then updates between. */
bool scene_ranks_late_to_the_round(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 3, 4, 40);
    AWAIT(scene_ended(scene->r[0]));
    scene->r[1] = scene_request(sim, 0, 0, 4, 40);
    scene->r[2] = scene_request(sim, 0, 1, 4, 10);
    AWAIT(scene_tokens(scene->r[1]) > 0);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT(scene_ok(scene->c[0]));
    EXPECT(!scene_ended(scene->r[1]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    AWAIT(scene_all_ended(scene, 3));
    EXPECT(scene_all_are(scene, 3, FINISH_LENGTH));
    AWAIT(scene_all_idle(sim));
    for (scene->i = 1; scene->i < 4; scene->i++) {
        EXPECT(scene->posted[scene->i] == scene->posted[0]);
    }
    SCENE_END;
}

bool scene_dense_ranks_are_independent(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    EXPECT_SERVED(0, 0, 4, 60);
    EXPECT(scene_steps(sim) == scene->posted[0]);
    EXPECT(engine_core_dummy_steps(sim->ranks[0].core) == 0);
    EXPECT(sim->now_ns - scene->since_ns <
           60 * 10 * LK_MS_NS); /* the slow rank is not waited for */
    SCENE_END;
}

bool scene_no_dummy_beside_work(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 0, 0, 4, 40);
    AWAIT(scene_tokens(scene->r[0]) > 0);
    scene->n[0] = engine_core_dummy_steps(sim->ranks[0].core);
    scene->n[1] = engine_core_dummy_steps(sim->ranks[1].core);
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(engine_core_dummy_steps(sim->ranks[0].core) == scene->n[0]);
    EXPECT(engine_core_dummy_steps(sim->ranks[1].core) >= scene->n[1] + 30);
    SCENE_END;
}

/* ---- load ---- */

bool scene_burst_is_spread(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT(scene_ok(scene->c[0]));
    for (scene->i = 0; scene->i < 40; scene->i++) {
        scene->r[scene->i] = scene_request(sim, 0, -1, 4, 4);
    }
    AWAIT_MS(50);
    for (scene->i = 0; scene->i < 4; scene->i++) {
        EXPECT(scheduler_num_waiting(engine_core_scheduler(sim->ranks[scene->i].core)) == 10);
    }
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_all_ended(scene, 40));
    EXPECT(scene_all_are(scene, 40, FINISH_LENGTH));
    SCENE_END;
}

static const msg_load_t *load_of(const sim_t *sim, uint32_t rank)
{
    static const msg_load_t none;
    const msg_load_t *load = engine_client_load(sim->fronts[0].client, rank);
    return load != NULL ? load : &none;
}

bool scene_dense_ranks_report(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    for (scene->i = 0; scene->i < 4; scene->i++) {
        scene->r[scene->i] = scene_request(sim, 0, scene->i, 4, 190);
    }
    AWAIT(load_of(sim, 0)->running == 1 && load_of(sim, 1)->running == 1 &&
          load_of(sim, 2)->running == 1 && load_of(sim, 3)->running == 1);
    EXPECT(sim->now_ns - scene->since_ns < 300 * LK_MS_NS);
    AWAIT(scene_all_ended(scene, 4));
    AWAIT(load_of(sim, 0)->running == 0 && load_of(sim, 3)->running == 0);
    EXPECT(sim->now_ns - scene->since_ns < 300 * LK_MS_NS);
    SCENE_END;
}

bool scene_reports_in_a_flood(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->n[0] = scene->sent[MSG_STATS];
    scene->n[1] = scene->sent[MSG_LOAD];
    scene->n[2] = scene->sent[MSG_ADD];
    AWAIT_MS(1000);
    EXPECT(scene->sent[MSG_ADD] - scene->n[2] > 2000);
    EXPECT(scene->sent[MSG_STATS] - scene->n[0] >= 9);
    EXPECT(scene->sent[MSG_LOAD] - scene->n[1] >= 9 * 2);
    SCENE_END;
}

bool scene_slow_reports_of_one_rank(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_delay(sim, SIM_LINK_EVENTS, sim_node_rank(sim, 1), sim_node_coord(), 700);
    scene->r[0] = scene_request(sim, 0, 0, 4, 100);
    scene->r[1] = scene_request(sim, 0, 1, 4, 100);
    AWAIT(scene_all_ended(scene, 2));
    EXPECT(load_of(sim, 1)->step == 0);
    AWAIT(load_of(sim, 0)->step == engine_core_steps(sim->ranks[0].core));
    AWAIT(load_of(sim, 1)->step == engine_core_steps(sim->ranks[1].core));
    EXPECT(sim->now_ns - scene->since_ns < 1500 * LK_MS_NS);
    EXPECT(load_of(sim, 1)->running == 0);
    SCENE_END;
}

/* ---- start, and processes that are silent ---- */

static bool starts_late(sim_t *sim, sim_scene_t *scene, uint64_t ms)
{
    SCENE_BEGIN_EARLY;
    scene_delay(sim, SIM_LINK_HANDSHAKE, sim_node_rank(sim, 1), sim_node_coord(), ms);
    AWAIT(sim->phase == SIM_SAFETY);
    EXPECT(sim->now_ns - 1000 * LK_SECOND_NS >= ms * LK_MS_NS);
    EXPECT_SERVED(0, 1, 4, 8);
    SCENE_END;
}

bool scene_slow_start(sim_t *sim, sim_scene_t *scene)
{
    return starts_late(sim, scene, 55000);
}

bool scene_rank_never_comes(sim_t *sim, sim_scene_t *scene)
{
    return starts_late(sim, scene, 500000);
}

bool scene_stopped_frontend(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene->r[0] = scene_request(sim, 1, 0, 4, 100);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene_stop(sim, sim_node_front(sim, 1), 3000);
    scene->r[1] = scene_request(sim, 0, 0, 4, 20);
    scene->r[2] = scene_request(sim, 0, 1, 4, 20);
    AWAIT(scene_ended(scene->r[1]) && scene_ended(scene->r[2]));
    EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, false);
    AWAIT(scene_ok(scene->c[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    EXPECT(sim->now_ns - scene->since_ns < LK_SECOND_NS);
    EXPECT(!scene_ended(scene->r[0]));
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene_all_are(scene, 3, FINISH_LENGTH));
    SCENE_END;
}

bool scene_stopped_coordinator(sim_t *sim, sim_scene_t *scene)
{
    SCENE_BEGIN;
    scene_stop(sim, sim_node_coord(), 4000);
    scene->n[0] = sim->now_ns;
    scene->r[0] = scene_request(sim, 0, 1, 4, 60);
    AWAIT(scene_tokens(scene->r[0]) > 3);
    scene->c[0] = scene_pause(sim, 0, PAUSE_KEEP, true);
    AWAIT(scene_ok(scene->c[0]));
    scene->c[1] = scene_resume(sim, 0);
    AWAIT(scene_ok(scene->c[1]));
    AWAIT(scene_ended(scene->r[0]));
    EXPECT(scene->r[0]->finish == FINISH_LENGTH);
    EXPECT(sim->now_ns - scene->n[0] < 2 * LK_SECOND_NS);
    AWAIT_MS(5000);
    SCENE_END;
}
