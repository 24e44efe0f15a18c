#include "tests/sim/batch.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_SECONDS 120 /* of one seed */
#define MAX_JOBS    64

/* Filled by the child. */
typedef struct {
    sim_result_t result;
    bool ended;
    uint64_t second_trace;
} slot_t;

typedef struct {
    pid_t pid;
    size_t seed;
    FILE *said; /* its standard error */
} child_t;

lk_status_t sim_batch_options(uint64_t seed, const char *const *sets, sim_options_t *out,
                              lk_error_t *err)
{
    sim_options_draw(out, seed);
    for (size_t i = 0; sets != NULL && sets[i] != NULL; i++) {
        LK_RETURN_IF_ERROR(sim_options_set(out, sets[i], err));
    }
    return LK_OK;
}

static void run_child(const sim_batch_t *batch, size_t i, slot_t *slot, FILE *said)
{
    dup2(fileno(said), STDERR_FILENO);
    alarm(MAX_SECONDS);
    sim_config_t config = batch->config;
    lk_error_t err = LK_ERROR_INIT;
    config.seed = batch->seeds[i];
    CHECKF(sim_batch_options(config.seed, batch->sets, &config.options, &err) == LK_OK, "%s",
           err.text);
    sim_run(&config, &slot->result);
    slot->second_trace = slot->result.trace;
    if (batch->twice && !slot->result.failed) {
        sim_result_t again;
        sim_run(&config, &again);
        slot->second_trace = again.trace;
    }
    slot->ended = true;
}

static child_t start(const sim_batch_t *batch, size_t i, slot_t *slots)
{
    child_t child = {.seed = i, .said = tmpfile()};
    CHECK(child.said != NULL);
    fflush(NULL);
    child.pid = fork();
    CHECK(child.pid >= 0);
    if (child.pid == 0) {
        run_child(batch, i, &slots[i], child.said);
        fflush(NULL);
        _exit(0);
    }
    return child;
}

/* Prints text with the prefix before each line. */
static void print(const sim_batch_t *batch, const char *text)
{
    while (*text != '\0') {
        int n = (int)strcspn(text, "\n");
        printf("%s%.*s\n", batch->prefix, n, text);
        text += n + (text[n] == '\n');
    }
}

static void print_said(const sim_batch_t *batch, FILE *said)
{
    char line[512];
    rewind(said);
    for (int n = 0; n < 40 && fgets(line, sizeof line, said) != NULL; n++) {
        print(batch, line);
    }
}

/* True if it passed. */
static bool judge(const sim_batch_t *batch, const child_t *child, int status, const slot_t *slot)
{
    const sim_result_t *r = &slot->result;
    bool clean = WIFEXITED(status) && WEXITSTATUS(status) == 0 && slot->ended;
    if (clean && !r->failed && slot->second_trace == r->trace) {
        return true;
    }
    char what[64];
    if (!clean) {
        snprintf(what, sizeof what, WIFSIGNALED(status) ? "crash, signal %d" : "exit status %d",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    } else {
        snprintf(what, sizeof what, "%s", r->failed ? r->check : "determinism");
    }
    char text[sizeof r->text + 256];
    snprintf(text, sizeof text, "FAILED seed %llu: %s: %s\n  replay: %s --seed %llu",
             (unsigned long long)batch->seeds[child->seed], what,
             !clean      ? "what it said follows"
             : r->failed ? r->text
                         : "two runs have different traces",
             batch->replay, (unsigned long long)batch->seeds[child->seed]);
    print(batch, text);
    if (!clean) {
        print_said(batch, child->said);
    }
    return false;
}

size_t sim_batch_run(const sim_batch_t *batch)
{
    size_t bytes = batch->n_seeds * sizeof(slot_t), failed = 0, next = 0, running = 0;
    slot_t *slots = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(slots != MAP_FAILED);
    child_t children[MAX_JOBS];
    const lk_env_t *clock = lk_env_real();
    uint64_t since = lk_env_now_ns(clock), shown = since;
    sim_result_t sum = {0};
    for (size_t done = 0; done < batch->n_seeds;) {
        while (next < batch->n_seeds && running < LK_MIN(batch->jobs, MAX_JOBS)) {
            children[running++] = start(batch, next++, slots);
        }
        int status = 0;
        pid_t pid = wait(&status);
        CHECK(pid > 0);
        for (size_t c = 0; c < running; c++) {
            if (children[c].pid == pid) {
                const sim_result_t *r = &slots[children[c].seed].result;
                failed += !judge(batch, &children[c], status, &slots[children[c].seed]);
                sum.events += r->events;
                sum.steps += r->steps;
                sum.tokens += r->tokens;
                sum.requests += r->requests;
                sum.calls += r->calls;
                sum.rounds += r->rounds;
                sum.updates += r->updates;
                sum.deaths += r->deaths;
                sum.removals += r->removals;
                sum.breaks += r->breaks;
                sum.epochs += r->epochs;
                sum.virtual_ns += r->virtual_ns;
                fclose(children[c].said);
                children[c] = children[--running];
                done++;
                break;
            }
        }
        uint64_t now = lk_env_now_ns(clock);
        if (isatty(STDERR_FILENO) && now - shown > LK_SECOND_NS / 2) {
            shown = now;
            fprintf(stderr, "\r%zu of %zu seeds, %zu failed ", done, batch->n_seeds, failed);
        }
    }
    munmap(slots, bytes);
    double seconds = (double)(lk_env_now_ns(clock) - since) / 1e9;
    char text[640];
    snprintf(
        text, sizeof text,
        "%zu seeds, %.1f s of virtual time in %.1f s: %.0f events/s (%llu events, %llu "
        "requests, %llu tokens, %llu calls, %llu updates, %llu steps, %llu rounds, %llu deaths, "
        "%llu removals, %llu broken connections, "
        "%llu group epochs)\n"
        "%zu passed, %zu failed",
        batch->n_seeds, (double)sum.virtual_ns / 1e9, seconds, (double)sum.events / seconds,
        (unsigned long long)sum.events, (unsigned long long)sum.requests,
        (unsigned long long)sum.tokens, (unsigned long long)sum.calls,
        (unsigned long long)sum.updates, (unsigned long long)sum.steps,
        (unsigned long long)sum.rounds, (unsigned long long)sum.deaths,
        (unsigned long long)sum.removals, (unsigned long long)sum.breaks,
        (unsigned long long)sum.epochs, batch->n_seeds - failed, failed);
    print(batch, text);
    return failed;
}
