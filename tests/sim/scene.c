#include "tests/sim/scene.h"
#include "base/check.h"
#include "tests/sim/checkers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS  (200 * 1000ull)
#define LIMIT_NS (60 * LK_SECOND_NS)

static const char quiet[] =
    "ranks=2 frontends=1 moe=1 doorbell=1 sync_interval=8 block_size=4 positions=512 "
    "max_num_seqs=8 max_batched_tokens=64 prefix_cache=1 backend=1 nccl=0 ring_bytes=4096 "
    "max_prompt=24 "
    "max_output=64 modes=7 latency_us=50 step_us=1000 control_timeout_ms=5000 "
    "transfer_timeout_ms=5000";

/* ---- the table ---- */

const sim_scenario_t sim_scenarios[] = {
#define SCENARIO(id, fault, sets, fails, holds) {#id, fault, sets, holds, fails, scene_##id},
#include "tests/sim/scenarios.def"
#undef SCENARIO
};
const size_t sim_n_scenarios = LK_ARRAY_LEN(sim_scenarios);

const sim_scenario_t *sim_scenario_find(const char *name)
{
    for (size_t i = 0; i < sim_n_scenarios; i++) {
        if (strcmp(sim_scenarios[i].name, name) == 0) {
            return &sim_scenarios[i];
        }
    }
    return NULL;
}

void sim_scenario_list(char *out, size_t room)
{
    size_t n = 0;
    for (size_t i = 0; i < sim_n_scenarios && n < room; i++) {
        n += (size_t)snprintf(out + n, room - n, "%s (%s): %s\n", sim_scenarios[i].name,
                              sim_scenarios[i].fault, sim_scenarios[i].holds);
    }
}

static void set_all(sim_options_t *out, const char *sets)
{
    char copy[1024], *save = NULL;
    CHECK(strlen(sets) < sizeof copy);
    strcpy(copy, sets);
    for (char *word = strtok_r(copy, " ", &save); word != NULL; word = strtok_r(NULL, " ", &save)) {
        lk_error_t err = LK_ERROR_INIT;
        CHECKF(sim_options_set(out, word, &err) == LK_OK, "%s", err.text);
    }
}

void sim_scenario_options(const sim_scenario_t *scenario, sim_options_t *out)
{
    memset(out, 0, sizeof *out);
    set_all(out, quiet);
    set_all(out, scenario->sets);
}

/* ---- the run ---- */

void sim_scene_start(sim_t *sim)
{
    if (sim->config.scenario == NULL) {
        return;
    }
    CHECK(sim->o.ranks <= SCENE_RANKS);
    sim->scene = calloc(1, sizeof *sim->scene);
    CHECK(sim->scene != NULL);
    sim_scene_tick(sim);
}

void sim_scene_stop(sim_t *sim)
{
    free(sim->scene);
    sim->scene = NULL;
}

bool sim_scene_over(const sim_t *sim)
{
    return sim->scene->over;
}

void sim_scene_tick(sim_t *sim)
{
    if (!sim->scene->over) {
        sim_post(sim, TICK_NS, SIM_EV_SCENE, 0, 0, 0, NULL);
    }
}

bool scene_waits(sim_t *sim, const sim_scene_t *scene, const char *what)
{
    if (sim->now_ns - scene->since_ns > LIMIT_NS && sim->config.scenario->fails[0] == '\0') {
        char text[256];
        snprintf(text, sizeof text, "%s: for a minute it is not true that %s",
                 sim->config.scenario->name, what);
        sim_fail_stuck(sim, text);
    }
    return false;
}

bool scene_fails(sim_t *sim, const sim_scene_t *scene, const char *what)
{
    sim_fail(sim, "scenario", "%s: it is not true that %s", sim->config.scenario->name, what);
    return true;
}

/* A checker, so that it sees what they see. */
static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    sim_scene_t *scene = sim->scene;
    if (scene == NULL) {
        return;
    }
    switch (saw->kind) {
    case SIM_SAW_STEP_POST:
        scene->posted[saw->rank]++;
        scene->in_step[saw->rank] = true;
        for (size_t i = 0; i < saw->batch->n_seqs; i++) {
            scene->fresh[saw->rank] += saw->batch->seqs[i].start == 0;
        }
        break;
    case SIM_SAW_STEP_DONE:
    case SIM_SAW_STEP_ABORT:
        scene->in_step[saw->rank] = false;
        break;
    case SIM_SAW_TRANSFER:
        scene->entered[saw->rank]++;
        break;
    case SIM_SAW_SENT:
        CHECK(saw->msg->type < LK_ARRAY_LEN(scene->sent));
        scene->sent[saw->msg->type]++;
        break;
    default:
        break;
    }
}

static void after(sim_t *sim, void *state)
{
    sim_scene_t *scene = sim->scene;
    if (scene != NULL && !scene->over && sim->phase <= SIM_SAFETY) {
        scene->over = sim->config.scenario->act(sim, scene);
    }
}

const sim_checker_t check_scenario = {
    .name = "scenario", .any_design = true, .state_size = 1, .saw = saw, .after = after};

/* ---- for scripts ---- */

sim_request_t *scene_request(sim_t *sim, uint32_t front, int64_t rank, uint32_t n_prompt,
                             uint32_t max_tokens)
{
    sim_request_t *r = sim_request_add(sim, SIM_NO_CLIENT, front, rank, n_prompt, max_tokens);
    CHECKF(r != NULL, "%s: a request is refused at once", sim->config.scenario->name);
    return r;
}

bool scene_all_ended(const sim_scene_t *scene, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!scene_ended(scene->r[i])) {
            return false;
        }
    }
    return true;
}

bool scene_all_are(const sim_scene_t *scene, size_t n, finish_reason_t finish)
{
    for (size_t i = 0; i < n; i++) {
        if (scene->r[i]->finish != finish) {
            return false;
        }
    }
    return true;
}

const sim_call_t *scene_pause(sim_t *sim, uint32_t front, pause_mode_t mode, bool clear_cache)
{
    return sim_call(sim, front, SIM_CALL_PAUSE, mode, clear_cache, NULL, 0, NULL, NULL);
}

const sim_call_t *scene_resume(sim_t *sim, uint32_t front)
{
    return sim_call(sim, front, SIM_CALL_RESUME, 0, false, NULL, 0, NULL, NULL);
}

static void on_session(sim_t *sim, void *ctx, const sim_call_t *last)
{
    sim->scene->session_over = true;
    sim->scene->session = last->verb == UPDATE_VERB_FINISH ? last->status : LK_ERR_STATE;
}

void scene_session(sim_t *sim)
{
    sim->scene->session_over = false;
    sim_trainer_repair(sim, on_session);
}

void scene_delay(sim_t *sim, sim_link_t link, uint32_t from, uint32_t to, uint64_t ms)
{
    sim_net_delay(sim, link, from, to, ms * LK_MS_NS);
}

void scene_delay_to_rank(sim_t *sim, uint32_t front, uint32_t rank, uint64_t ms)
{
    scene_delay(sim, SIM_LINK_INPUT, sim_node_front(sim, front), sim_node_rank(sim, rank), ms);
}

void scene_delay_start(sim_t *sim, uint32_t rank, uint64_t ms)
{
    scene_delay(sim, SIM_LINK_WAVE, sim_node_coord(), sim_node_rank(sim, rank), ms);
}

void scene_lose(sim_t *sim, msg_type_t type, uint32_t from, uint32_t to)
{
    sim->scene->lose.type = type;
    sim->scene->lose.from = from;
    sim->scene->lose.to = to;
    sim->scene->lose.due = true;
}

bool sim_scene_loses(sim_t *sim, uint32_t from, uint32_t to, const msg_t *msg)
{
    sim_scene_t *scene = sim->scene;
    bool lost = scene != NULL && scene->lose.due && scene->lose.from == from &&
                scene->lose.to == to && scene->lose.type == msg->type;
    if (lost) {
        scene->lose.due = false;
        sim_log(sim, "%s from node %u to %u is lost", msg_type_name(msg->type), from, to);
    }
    return lost;
}

void scene_kill(sim_t *sim, uint32_t node)
{
    sim_fault_kill(sim, node);
}

void scene_remove(sim_t *sim, uint32_t rank)
{
    sim_fault_remove(sim, rank);
}

bool scene_is_whole(const sim_t *sim, uint64_t epoch)
{
    return sim_everybody_serves(sim) && sim->ranks[sim_first_member(sim)].enrol.epoch == epoch;
}

void scene_stop(sim_t *sim, uint32_t node, uint64_t ms)
{
    sim_fault_stop_node(sim, node, ms * LK_MS_NS);
}

const group_t *scene_group(const sim_t *sim, uint32_t rank)
{
    return engine_core_group(sim->ranks[rank].core);
}

bool scene_all_idle(const sim_t *sim)
{
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        if (group_run(scene_group(sim, r)) || sim->scene->in_step[r]) {
            return false;
        }
    }
    return true;
}

uint64_t scene_steps(const sim_t *sim)
{
    uint64_t n = 0;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        n += sim->scene->posted[r];
    }
    return n;
}

bool scene_front_says_run(const sim_t *sim, uint32_t front)
{
    engine_client_info_t info;
    engine_client_info(sim->fronts[front].client, &info);
    return info.run;
}
