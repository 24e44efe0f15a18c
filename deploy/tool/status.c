#include "base/check.h"
#include "deploy/client/http_client.h"
#include "deploy/tool/tool.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* GETs base+path and parses the reply; NULL after printing what went wrong. */
static json_t *get(const char *base, const char *path, const char *key)
{
    char url[600];
    snprintf(url, sizeof url, "%s%s", base, path);
    http_reply_t reply;
    lk_error_t err = LK_ERROR_INIT;
    json_t *json = NULL;
    if (http_call("GET", url, NULL, key, 10, &reply, &err) != LK_OK) {
        fprintf(stderr, "lockstep: %s\n", err.text);
    } else if (reply.status != 200) {
        fprintf(stderr, "lockstep: GET %s: %d %s\n", path, reply.status, lk_buf_cstr(&reply.body));
    } else {
        json_error_t je;
        json = json_loadb((const char *)reply.body.data, reply.body.len, 0, &je);
        if (json == NULL) {
            fprintf(stderr, "lockstep: GET %s: the reply is no JSON\n", path);
        }
    }
    http_reply_fini(&reply);
    return json;
}

static const char *text(const json_t *row, const char *field)
{
    const char *s = json_string_value(json_object_get(row, field));
    return s != NULL ? s : "-";
}

static long long number(const json_t *row, const char *field)
{
    return (long long)json_integer_value(json_object_get(row, field));
}

static void print_ranks(const json_t *weights, const json_t *info)
{
    printf("%-4s %-12s %-16s %-6s %-32s %-6s %8s %8s %10s %8s %6s\n", "rank", "state", "version",
           "epoch", "digest", "dirty", "running", "waiting", "steps", "dummy", "wave");
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(weights, "ranks"), i, row)
    {
        json_t *engine = NULL, *e;
        size_t k;
        json_array_foreach(json_object_get(info, "engines"), k, e)
        {
            if (number(e, "rank") == number(row, "rank")) {
                engine = e;
            }
        }
        printf("%-4lld %-12s %-16s %-6lld %-32s %-6s %8lld %8lld %10lld %8lld %6lld\n",
               number(row, "rank"), text(row, "state"), text(row, "version"), number(row, "epoch"),
               text(row, "digest"), json_is_true(json_object_get(row, "dirty")) ? "yes" : "no",
               number(engine, "running"), number(engine, "waiting"), number(engine, "steps"),
               number(engine, "dummy_steps"), number(engine, "wave"));
        const json_t *update = json_object_get(row, "update");
        if (json_is_object(update) && number(update, "tensors_total") > 0) {
            printf("     update (%s): %s, tensors %lld of %lld, bytes %lld of %lld %s\n",
                   text(row, "weight_swap"), text(update, "phase"), number(update, "tensors_done"),
                   number(update, "tensors_total"), number(update, "bytes_done"),
                   number(update, "bytes_total"), text(update, "waiting_for"));
        }
    }
}

static void print_removed(const json_t *info)
{
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(json_object_get(info, "group"), "removed"), i, row)
    {
        printf("%-4lld %-12s %s\n", number(row, "rank"), "removed", text(row, "why"));
    }
}

int tool_status(int argc, char **argv)
{
    const char *url = "http://127.0.0.1:8000", *key = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--url") == 0 && i + 1 < argc) {
            url = argv[++i];
        } else if (strcmp(argv[i], "--admin-key") == 0 && i + 1 < argc) {
            key = argv[++i];
        } else {
            bool help = strcmp(argv[i], "--help") == 0;
            fprintf(help ? stdout : stderr, "usage: lockstep status [--url %s] [--admin-key KEY]\n",
                    url);
            return help ? 0 : 2;
        }
    }
    int rc = 1;
    json_t *info = get(url, "/server_info", key);
    json_t *weights = info != NULL ? get(url, "/weight_info", key) : NULL;
    json_t *paused = weights != NULL ? get(url, "/is_paused", key) : NULL;
    if (paused != NULL) {
        printf("%s  model %s  version %s  %s  trainer %s\n", url, text(info, "model"),
               text(weights, "weight_version"),
               json_is_true(json_object_get(paused, "is_paused")) ? "PAUSED" : "running",
               text(info, "trainer_endpoint"));
        print_ranks(weights, info);
        print_removed(info);
        rc = 0;
    }
    json_decref(info);
    json_decref(weights);
    json_decref(paused);
    return rc;
}
