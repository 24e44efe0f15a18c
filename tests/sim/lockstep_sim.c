/* lockstep-sim: runs seeds of the simulator. Start reading at sim.h. */
#include "base/check.h"
#include "base/log.h"
#include "tests/sim/batch.h"
#include "tests/sim/design.h"
#include "tests/sim/scale.h"
#include "tests/sim/scene.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_SETS 64

static const char usage[] =
    "usage: sim --seed S        one seed, with its options, figures and trace hash\n"
    "       sim --seeds N       N fresh seeds, each in a process of its own\n"
    "       sim --scale         what 2 to 256 ranks cost (minutes)\n"
    "  --first S               seeds S, S+1, ... instead of fresh ones\n"
    "  --events N              events of the safety phase (10000)\n"
    "  --design frontend-pause the old design, with the pause state in the front end\n"
    "  --set NAME=VALUE        overrides an option (tests/sim/options.def)\n"
    "  --canary NAME           plants a fault that a checker has to catch\n"
    "  --scenario NAME         runs a script (tests/sim/scenarios.def) with --seed S\n"
    "  --twice                 runs each seed twice and compares the traces\n"
    "  --jobs N                processes at once (1)\n"
    "  --log                   one line per event (with --seed)\n";

typedef struct {
    sim_config_t config;
    const char *sets[MAX_SETS + 1];
    size_t n_sets;
    uint64_t seed, n_seeds, first, jobs;
    bool one, scale, has_first, twice, frontend_pause;
} args_t;

static bool number(const char *text, uint64_t *out)
{
    char *end;
    *out = strtoull(text, &end, 0);
    return text[0] != '\0' && *end == '\0';
}

static bool parse(int argc, char **argv, args_t *a)
{
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(arg, "--log") == 0) {
            a->config.log = true;
            continue;
        } else if (strcmp(arg, "--scale") == 0) {
            a->scale = true;
            continue;
        } else if (strcmp(arg, "--twice") == 0) {
            a->twice = true;
            continue;
        }
        bool ok = value != NULL;
        if (ok && strcmp(arg, "--seed") == 0) {
            ok = a->one = number(value, &a->seed);
        } else if (ok && strcmp(arg, "--seeds") == 0) {
            ok = number(value, &a->n_seeds) && a->n_seeds > 0;
        } else if (ok && strcmp(arg, "--first") == 0) {
            ok = a->has_first = number(value, &a->first);
        } else if (ok && strcmp(arg, "--events") == 0) {
            ok = number(value, &a->config.max_events);
        } else if (ok && strcmp(arg, "--jobs") == 0) {
            ok = number(value, &a->jobs) && a->jobs > 0;
        } else if (ok && strcmp(arg, "--set") == 0) {
            ok = a->n_sets < MAX_SETS;
            a->sets[ok ? a->n_sets++ : 0] = value;
        } else if (ok && strcmp(arg, "--canary") == 0) {
            ok = (a->config.canary = sim_canary_find(value)) != SIM_CANARY_NONE;
        } else if (ok && strcmp(arg, "--scenario") == 0) {
            ok = (a->config.scenario = sim_scenario_find(value)) != NULL;
        } else if (ok && strcmp(arg, "--design") == 0) {
            a->frontend_pause = strcmp(value, "frontend-pause") == 0;
            ok = a->frontend_pause || strcmp(value, "lockstep") == 0;
        } else {
            ok = false;
        }
        if (!ok) {
            return false;
        }
        i++;
    }
    return a->one || a->scale || a->n_seeds > 0;
}

/* The other design is another program beside this one. */
static int run_other(const char *self, char **argv)
{
    char path[4096];
    const char *slash = strrchr(self, '/');
    snprintf(path, sizeof path, "%.*s%s", slash != NULL ? (int)(slash - self + 1) : 0, self,
             "lockstep-sim-frontend-pause");
    execv(path, argv);
    perror(path);
    return 2;
}

static int run_one(args_t *a)
{
    static char text[4096];
    lk_error_t err = LK_ERROR_INIT;
    sim_result_t r;
    a->config.seed = a->seed;
    if (sim_batch_options(a->seed, a->sets, &a->config.options, &err) != LK_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    if (a->config.scenario != NULL) {
        sim_scenario_options(a->config.scenario, &a->config.options);
    }
    sim_options_text(&a->config.options, text, sizeof text);
    printf("seed %llu: %s\n", (unsigned long long)a->seed, text);
    fflush(stdout);
    sim_run(&a->config, &r);
    printf("%llu events, %.3f s of virtual time, %llu requests, %llu tokens, %llu calls, %llu "
           "updates, %llu steps, %llu rounds\ntrace %016llx\n",
           (unsigned long long)r.events, (double)r.virtual_ns / 1e9, (unsigned long long)r.requests,
           (unsigned long long)r.tokens, (unsigned long long)r.calls, (unsigned long long)r.updates,
           (unsigned long long)r.steps, (unsigned long long)r.rounds, (unsigned long long)r.trace);
    if (r.failed) {
        printf("FAILED %s: %s\n", r.check, r.text);
    }
    return r.failed;
}

static int run_many(const args_t *a)
{
    char replay[2048];
    size_t n = (size_t)snprintf(replay, sizeof replay, "./run sim%s",
                                a->frontend_pause ? " --design frontend-pause" : "");
    for (size_t i = 0; i < a->n_sets && n < sizeof replay; i++) {
        n += (size_t)snprintf(replay + n, sizeof replay - n, " --set %s", a->sets[i]);
    }
    if (a->config.canary != SIM_CANARY_NONE && n < sizeof replay) {
        n += (size_t)snprintf(replay + n, sizeof replay - n, " --canary %s",
                              sim_canary_name(a->config.canary));
    }
    if (a->config.max_events != 10000 && n < sizeof replay) {
        snprintf(replay + n, sizeof replay - n, " --events %llu",
                 (unsigned long long)a->config.max_events);
    }
    sim_batch_t batch = {.config = a->config,
                         .seeds = calloc(a->n_seeds, sizeof(uint64_t)),
                         .n_seeds = a->n_seeds,
                         .jobs = (unsigned)a->jobs,
                         .twice = a->twice,
                         .sets = a->sets,
                         .prefix = "",
                         .replay = replay};
    CHECK(batch.seeds != NULL);
    uint64_t first = a->has_first ? a->first : lk_env_random_u64(lk_env_real()) >> 20;
    printf("seeds %llu to %llu\n", (unsigned long long)first,
           (unsigned long long)(first + a->n_seeds - 1));
    for (size_t i = 0; i < a->n_seeds; i++) {
        batch.seeds[i] = first + i;
    }
    size_t failed = sim_batch_run(&batch);
    free(batch.seeds);
    return failed > 0;
}

int main(int argc, char **argv)
{
    args_t a = {.config = {.max_events = 10000}, .jobs = 1};
    if (!parse(argc, argv, &a)) {
        char canaries[4096], scenarios[8192];
        sim_canary_list(canaries, sizeof canaries);
        sim_scenario_list(scenarios, sizeof scenarios);
        fprintf(stderr, "%scanaries (and who has to catch them):\n%sscenarios:\n%s", usage,
                canaries, scenarios);
        return 2;
    }
    if (a.frontend_pause != sim_design_frontend_pause) {
        return run_other(argv[0], argv);
    }
    a.config.frontend_pause = a.frontend_pause;
    json_object_seed(1); /* no order of anything depends on the process */
    lk_log_init("sim", a.config.log ? LK_LOG_DEBUG : LK_LOG_ERROR, LK_LOG_TEXT);
    lk_error_t err = LK_ERROR_INIT;
    sim_options_t options;
    if (sim_batch_options(0, a.sets, &options, &err) != LK_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    return a.scale ? sim_scale_run() : a.one ? run_one(&a) : run_many(&a);
}
