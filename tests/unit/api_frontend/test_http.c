/* The whole front end over real sockets on loopback, against engines in memory. */
#include "base/check.h"
#include "proto/limits.h"
#include "proto/wire_json.h"
#include "tests/lib/test_main.h"
#include "tests/unit/api_frontend/fake_cluster.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static fcl_t c;
static tokenizer_t *tokenizer;

static const http_limits_t limits = {
    .max_headers = 16384, .max_body = 1 << 20, .max_unsent = 64 << 10, .idle_s = 20};

static void setup_flags(bool zmq, char *const *flags)
{
    lk_error_t err = LK_ERROR_INIT;
    ck_assert_msg(tokenizer_write_bytes(test_tmpdir(), 300, &err) == LK_OK, "%s", err.text);
    ck_assert_msg(tokenizer_load(test_tmpdir(), &tokenizer, &err) == LK_OK, "%s", err.text);
    fcl_init(&c, zmq, &limits, tokenizer, flags);
}

static void setup(void)
{
    setup_flags(false, NULL);
}

static void setup_zmq(void)
{
    setup_flags(true, NULL);
}

static void setup_keys(void)
{
    static char *const flags[] = {(char *)"--api-key", (char *)"user-key", (char *)"--admin-key",
                                  (char *)"root-key", NULL};
    setup_flags(false, flags);
}

static void teardown(void)
{
    fcl_fini(&c);
    tokenizer_destroy(&tokenizer);
}

/* ---- a client ---- */

typedef struct {
    int fd;
    char *text;
    size_t len;
    bool closed, deaf;
} cli_t;

static void cli_open(cli_t *cli)
{
    memset(cli, 0, sizeof *cli);
    cli->fd = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_ge(cli->fd, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(c.port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ck_assert_int_eq(connect(cli->fd, (struct sockaddr *)&address, sizeof address), 0);
    fcntl(cli->fd, F_SETFL, O_NONBLOCK);
    cli->text = calloc(1, 1);
}

static void cli_close(cli_t *cli)
{
    if (cli->fd >= 0) {
        close(cli->fd);
    }
    cli->fd = -1;
    free(cli->text);
    cli->text = NULL;
}

static void turn(cli_t *cli)
{
    fcl_turn(&c);
    char buf[65536];
    ssize_t n = cli != NULL && cli->fd >= 0 && !cli->deaf ? read(cli->fd, buf, sizeof buf) : -2;
    if (n > 0) {
        cli->text = realloc(cli->text, cli->len + (size_t)n + 1);
        memcpy(cli->text + cli->len, buf, (size_t)n);
        cli->len += (size_t)n;
        cli->text[cli->len] = '\0';
    } else if (n == 0 || (n == -1 && errno != EAGAIN)) {
        cli->closed = true;
    }
}

static void cli_send_bytes(cli_t *cli, const char *data, size_t len)
{
    while (len > 0 && !cli->closed) {
        ssize_t n = send(cli->fd, data, len, MSG_NOSIGNAL);
        if (n > 0) {
            data += n;
            len -= (size_t)n;
        } else if (errno != EAGAIN) {
            return; /* the server has closed: what it said is still to be read */
        }
        turn(cli);
    }
}

static void cli_send(cli_t *cli, const char *text)
{
    cli_send_bytes(cli, text, strlen(text));
}

static void cli_request(cli_t *cli, const char *method, const char *path, const char *headers,
                        const char *body)
{
    char head[4096];
    snprintf(head, sizeof head, "%s %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %zu\r\n\r\n",
             method, path, headers, strlen(body));
    cli_send(cli, head);
    cli_send(cli, body);
}

static void wait_for(cli_t *cli, const char *text)
{
    while (strstr(cli->text, text) == NULL) {
        ck_assert_msg(!cli->closed, "closed before \"%s\": %s", text, cli->text);
        turn(cli);
    }
}

/* Waits for one whole reply; *body points into cli->text. Returns its status. */
static int cli_reply(cli_t *cli, const char **body)
{
    wait_for(cli, "\r\n\r\n");
    const char *head_end = strstr(cli->text, "\r\n\r\n") + 4;
    const char *length = strcasestr(cli->text, "content-length:");
    ck_assert_msg(length != NULL && length < head_end, "no Content-Length: %s", cli->text);
    size_t need = (size_t)(head_end - cli->text) + strtoul(length + 15, NULL, 10);
    size_t at = (size_t)(head_end - cli->text);
    while (cli->len < need) {
        ck_assert_msg(!cli->closed, "closed early: %s", cli->text);
        turn(cli);
    }
    *body = cli->text + at;
    return atoi(cli->text + 9);
}

/* One call on a connection of its own: status, and the body as JSON in *json (owned by the caller
 * through the static holder). */
static json_t *held;

static int ask_with(const char *method, const char *path, const char *headers, const char *body)
{
    cli_t cli;
    const char *text;
    cli_open(&cli);
    cli_request(&cli, method, path, headers, body);
    int status = cli_reply(&cli, &text);
    ck_assert_msg(strstr(cli.text, "Content-Type: application/json") != NULL, "%s", cli.text);
    json_decref(held);
    held = json_loads(text, 0, NULL);
    ck_assert_msg(held != NULL, "not JSON: %s", text);
    cli_close(&cli);
    return status;
}

static int ask(const char *method, const char *path, const char *body)
{
    return ask_with(method, path, "", body);
}

static const char *text_at(const char *a, const char *b)
{
    const json_t *value = json_object_get(held, a);
    value = b != NULL ? json_object_get(value, b) : value;
    return json_is_string(value) ? json_string_value(value) : "(none)";
}

/* ---- every route ---- */

START_TEST(test_information)
{
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
    ck_assert_str_eq(text_at("status", NULL), "ok");
    ck_assert_str_eq(text_at("state", NULL), "running");
    ck_assert_int_eq(ask("GET", "/ping", ""), 200);
    ck_assert_int_eq(ask("GET", "/v1/models", ""), 200);
    const json_t *model = json_array_get(json_object_get(held, "data"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(model, "id")), "model-dir");
    ck_assert_int_eq(json_integer_value(json_object_get(model, "max_model_len")), 4096);
    ck_assert_int_eq(ask("GET", "/version", ""), 200);
    ck_assert_int_eq(ask("GET", "/server_info?config_format=json", ""), 200);
    ck_assert_str_eq(text_at("trainer_endpoint", NULL), c.trainer);
    const json_t *engine = json_array_get(json_object_get(held, "engines"), 1);
    ck_assert_int_eq(json_integer_value(json_object_get(engine, "steps")), 101);
    ck_assert_int_eq(ask("GET", "/get_world_size", ""), 200);
    ck_assert_int_eq(json_integer_value(json_object_get(held, "world_size")), 2);
    ck_assert_uint_eq(json_array_size(json_object_get(held, "ranks")), 2);
    ck_assert_int_eq(ask("GET", "/get_world_size?include_dp=false", ""), 200);
    ck_assert_int_eq(json_integer_value(json_object_get(held, "world_size")), 1);
}
END_TEST

START_TEST(test_pause_and_resume)
{
    ck_assert_int_eq(ask("GET", "/is_paused", ""), 200);
    ck_assert(json_is_false(json_object_get(held, "is_paused")));
    ck_assert_int_eq(ask("POST", "/pause?mode=keep&clear_cache=false", ""), 200);
    ck_assert_str_eq(text_at("status", NULL), "paused");
    ck_assert_int_eq(ask("GET", "/is_paused", ""), 200);
    ck_assert(json_is_true(json_object_get(held, "is_paused")));
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
    ck_assert_str_eq(text_at("state", NULL), "paused");
    ck_assert_int_eq(ask("POST", "/resume", ""), 200);
    ck_assert_str_eq(text_at("status", NULL), "resumed");
    ck_assert_int_eq(ask("POST", "/pause", "{\"mode\":\"wait\"}"), 200);
    ck_assert_int_eq(ask("POST", "/resume", "{}"), 200);

    ck_assert_int_eq(ask("POST", "/pause?mode=invalid", ""), 400);
    ck_assert_str_eq(text_at("error", "param"), "query.mode");
    ck_assert_str_eq(text_at("error", "type"), "Bad Request");
    ck_assert_int_eq(ask("POST", "/pause?clear_cache=maybe", ""), 400);
    ck_assert_str_eq(text_at("error", "param"), "query.clear_cache");
    ck_assert_int_eq(ask("POST", "/pause", "{\"mode\":3}"), 400);
    ck_assert_str_eq(text_at("error", "param"), "mode");
    ck_assert_int_eq(ask("POST", "/pause?timeout_s=0", ""), 400);
    ck_assert_str_eq(text_at("error", "param"), "query.timeout_s");
    ck_assert(!c.paused);

    c.silent = true;
    ck_assert_int_eq(ask("POST", "/pause?timeout_s=0.05", ""), 504);
    ck_assert_str_eq(text_at("error", "message"),
                     "pause was not completed within 0.05 s: ranks 0, 1 did not finish; the pause "
                     "is rolled back; ranks that agreed to it in time have ended their requests");
}
END_TEST

/* A large body that comes again is known; one that differs from it in a byte is another. */
START_TEST(test_the_same_large_body)
{
    enum { N = 100000, AT = 300 }; /* the cluster keeps the first 511 bytes */
    char *body = malloc(N + 1);
    memset(body, 'A', N);
    static const char head[] = "{\"update_info\":{\"x\":\"", tail[] = "\"}}";
    memcpy(body, head, sizeof head - 1);
    strcpy(body + N - (sizeof tail - 1), tail);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(ask("POST", "/update_weights", body), 200);
        ck_assert_int_eq(strncmp(c.last_spec, body, sizeof c.last_spec - 1), 0);
        ck_assert_int_eq(ask("POST", "/update_weights", body), 200);
        ck_assert_int_eq(strncmp(c.last_spec, body, sizeof c.last_spec - 1), 0);
        body[AT] = 'B';
        ck_assert_int_eq(ask("POST", "/update_weights", body), 200);
        ck_assert_int_eq(strncmp(c.last_spec, body, sizeof c.last_spec - 1), 0);
        body[AT] = '\n';
        ck_assert_int_eq(ask("POST", "/update_weights", body), 400);
        body[AT] = 'A';
        body[2] = 'o'; /* "opdate_info" */
        ck_assert_int_eq(ask("POST", "/update_weights", body), 400);
        body[2] = 'u';
    }
    ck_assert_int_eq(ask("POST", "/init_weight_transfer_engine", body), 400); /* no init_info */
    free(body);
}
END_TEST

START_TEST(test_weight_calls)
{
    ck_assert_int_eq(ask("POST", "/init_weight_transfer_engine", "{\"init_info\":{\"x\":1}}"), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weight transfer initialized");
    ck_assert_str_eq(c.last_spec, "{\"init_info\":{\"x\":1}}");
    ck_assert_int_eq(ask("POST", "/start_weight_update", ""), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weight update started");
    ck_assert_int_eq(ask("POST", "/start_weight_update", "{\"is_checkpoint_format\":true}"), 200);
    ck_assert_int_eq(ask("POST", "/update_weights", "{\"update_info\":{\"names\":[]}}"), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weights updated");
    ck_assert_str_eq(c.last_spec, "{\"update_info\":{\"names\":[]}}");
    ck_assert_int_eq(ask("POST", "/update_weights", "{\"update_info\":[{},{}]}"), 200);
    /* the client's own text, once it has been read */
    const char *own = "{ \"timeout_s\": 5, \"update_info\" : {\"x\":\"\\u00e4\", \"n\": 1.50} }\n";
    ck_assert_int_eq(ask("POST", "/update_weights", own), 200);
    ck_assert_str_eq(c.last_spec, own);
    ck_assert_int_eq(
        ask("POST", "/finish_weight_update?weight_version=asked", "{\"weight_version\":\"told\"}"),
        200);
    ck_assert_str_eq(c.last_spec, "{\"weight_version\":\"asked\"}");
    ck_assert_int_eq(ask("POST", "/finish_weight_update", ""), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weight update finished");
    ck_assert_int_eq(ask("POST", "/finish_weight_update", "{\"weight_version\":null}"), 200);
    ck_assert_int_eq(ask("POST", "/finish_weight_update", "{\"weight_version\":\"v7\"}"), 200);
    ck_assert_str_eq(c.last_spec, "{\"weight_version\":\"v7\"}");
    /* a whole session; the last call is its finish */
    ck_assert_int_eq(ask("POST", "/update_weights", "{\"weight_dir\":\"/w/step-3//\"}"), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weights updated");
    ck_assert_str_eq(c.last_spec, "{\"weight_version\":\"step-3\"}");
    ck_assert_int_eq(ask("POST", "/update_weights",
                         "{\"weight_dir\":\"/w/step-3\",\"weight_version\":\"mine\"}"),
                     200);
    ck_assert_str_eq(c.last_spec, "{\"weight_version\":\"mine\"}");
    ck_assert_int_eq(ask("POST", "/abort_weight_update", ""), 200);
    ck_assert_int_eq(ask("POST", "/update_weight_version", "{\"new_version\":\"v8\"}"), 200);
    ck_assert(json_is_true(json_object_get(held, "success")));
    ck_assert_str_eq(text_at("new_version", NULL), "v8");
    ck_assert_str_eq(c.last_spec, "{\"new_version\":\"v8\"}");
    ck_assert_int_eq(ask("POST", "/reset_prefix_cache?reset_running_requests=false", ""), 200);
    ck_assert(json_is_true(json_object_get(held, "success")));

    ck_assert_int_eq(ask("GET", "/weight_info", ""), 200);
    ck_assert_str_eq(text_at("weight_version", NULL), "v1");
    ck_assert(json_is_true(json_object_get(held, "consistent")));
    ck_assert_uint_eq(json_array_size(json_object_get(held, "ranks")), 2);

    static const char *const bad[][3] = {
        {"/init_weight_transfer_engine", "{}", "init_info"},
        {"/init_weight_transfer_engine", "{\"init_info\":[]}", "init_info"},
        {"/init_weight_transfer_engine", "", "body"},
        {"/init_weight_transfer_engine", "{\"init_info\":", "body"},
        {"/start_weight_update", "{\"is_checkpoint_format\":5}", "is_checkpoint_format"},
        {"/start_weight_update", "[]", "body"},
        {"/update_weights", "{\"names\":[]}", "update_info"},
        {"/update_weights", "{\"weight_dir\":7}", "weight_dir"},
        {"/update_weights", "{\"weight_dir\":null}", "weight_dir"},
        {"/update_weights", "{\"weight_dir\":\"/w\",\"update_info\":{}}", "weight_dir"},
        {"/update_weights", "{\"weight_dir\":\"/w\",\"weight_version\":7}", "weight_version"},
        {"/update_weights", "{\"update_info\":\"x\"}", "update_info"},
        {"/finish_weight_update", "{\"weight_version\":7}", "weight_version"},
        {"/update_weight_version", "{}", "new_version"},
        {"/update_weight_version", "{\"new_version\":7}", "new_version"},
        {"/abort_requests", "{\"request_ids\":\"x\"}", "request_ids"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        ck_assert_msg(ask("POST", bad[i][0], bad[i][1]) == 400, "%s %s", bad[i][0], bad[i][1]);
        ck_assert_msg(strcmp(text_at("error", "param"), bad[i][2]) == 0, "%s %s: %s", bad[i][0],
                      bad[i][1], text_at("error", "param"));
    }

    c.update_status = LK_ERR_STATE;
    c.update_text = "start_weight_update must be called before update_weights.";
    ck_assert_int_eq(ask("POST", "/update_weights", "{\"update_info\":{}}"), 409);
    ck_assert_str_eq(text_at("error", "message"), c.update_text);
    ck_assert_int_eq(ask("GET", "/weight_info", ""), 200);
    ck_assert(json_is_false(json_object_get(held, "consistent")));
}
END_TEST

START_TEST(test_paths_and_methods)
{
    ck_assert_int_eq(ask("GET", "/nothing", ""), 404);
    ck_assert_int_eq(ask("GET", "/v1/completions/", ""), 404);
    ck_assert_int_eq(ask("GET", "/pause", ""), 405);
    cli_t cli;
    const char *body;
    cli_open(&cli);
    cli_request(&cli, "DELETE", "/v1/models", "", "");
    ck_assert_int_eq(cli_reply(&cli, &body), 405);
    ck_assert_ptr_nonnull(strstr(cli.text, "Allow: GET"));
    cli_close(&cli);
}
END_TEST

START_TEST(test_keys)
{
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
    ck_assert_int_eq(ask("GET", "/v1/models", ""), 401);
    ck_assert_str_eq(text_at("error", "param"), "Authorization");
    ck_assert_int_eq(ask_with("GET", "/v1/models", "Authorization: Bearer wrong\r\n", ""), 401);
    ck_assert_int_eq(ask_with("GET", "/v1/models", "Authorization: Basic user-key\r\n", ""), 401);
    ck_assert_int_eq(ask_with("GET", "/v1/models", "Authorization: Bearer user-key\r\n", ""), 200);
    ck_assert_int_eq(ask_with("POST", "/pause", "Authorization: Bearer user-key\r\n", ""), 401);
    ck_assert(!c.paused);
    ck_assert_int_eq(ask_with("POST", "/pause", "Authorization: Bearer root-key\r\n", ""), 200);
    ck_assert(c.paused);
}
END_TEST

START_TEST(test_idempotency)
{
    const char *key = "Idempotency-Key: k1\r\n";
    ck_assert_int_eq(ask_with("POST", "/start_weight_update", key, ""), 200);
    c.update_status = LK_ERR_STATE;
    c.update_text = "already active";
    ck_assert_int_eq(ask_with("POST", "/start_weight_update", key, ""), 200); /* not sent again */
    ck_assert_int_eq(ask("POST", "/start_weight_update", ""), 409);
    ck_assert_int_eq(ask_with("POST", "/update_weights", key, "{\"update_info\":{}}"), 409);
    ck_assert_int_eq(ask_with("POST", "/update_weights", key, "{\"update_info\":{\"a\":1}}"), 400);
    ck_assert_str_eq(text_at("error", "param"), "Idempotency-Key");
    /* two at once: one command, two answers */
    c.silent = true;
    cli_t a, b;
    const char *body;
    cli_open(&a);
    cli_open(&b);
    const char *other = "Idempotency-Key: k2\r\n";
    cli_request(&a, "POST", "/pause?timeout_s=0.2", other, "");
    cli_request(&b, "POST", "/pause?timeout_s=0.2", other, "");
    ck_assert_int_eq(cli_reply(&a, &body), 504);
    ck_assert_int_eq(cli_reply(&b, &body), 504);
    cli_close(&a);
    cli_close(&b);
}
END_TEST

/* ---- completions ---- */

START_TEST(test_completion)
{
    ck_assert_int_eq(ask("POST", "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":5}"), 200);
    const json_t *choice = json_array_get(json_object_get(held, "choices"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(choice, "text")), "abcde");
    ck_assert_int_eq(ask("POST", "/v1/completions", "{\"prompt\":\"hi\",\"n\":\"x\"}"), 400);
    ck_assert_str_eq(text_at("error", "param"), "n");
    ck_assert_int_eq(ask("POST", "/v1/completions", "{\"prompt\""), 400);
    ck_assert_int_eq(
        ask_with("POST", "/v1/completions", "X-data-parallel-rank: 7\r\n", "{\"prompt\":\"hi\"}"),
        400);
    ck_assert_str_eq(text_at("error", "param"), "X-data-parallel-rank");
    ck_assert_int_eq(
        ask_with("POST", "/v1/completions", "X-data-parallel-rank: one\r\n", "{\"prompt\":\"hi\"}"),
        400);
    ck_assert_int_eq(ask_with("POST", "/v1/completions", "X-Request-Id: my-id\r\n",
                              "{\"prompt\":\"hi\",\"max_tokens\":1}"),
                     200);
    ck_assert_str_eq(text_at("id", NULL), "cmpl-my-id");
    ck_assert_int_eq(ask_with("POST", "/v1/completions", "X-Request-Id: \"quoted\"\r\n",
                              "{\"prompt\":\"hi\",\"max_tokens\":1}"),
                     400);
    c.hold = true;
    cli_t cli;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "X-data-parallel-rank: 1\r\n",
                "{\"prompt\":\"hi\"}");
    while (!c.requests[0].used) {
        turn(&cli);
    }
    ck_assert_uint_eq(c.requests[0].rank, 1);
    cli_close(&cli);
    while (c.n_aborted == 0) {
        turn(NULL);
    }
}
END_TEST

/* One session's requests stay on a rank; others are elsewhere too. */
START_TEST(test_session_header)
{
    uint32_t home[8];
    bool used[2] = {false, false};
    for (int i = 0; i < 16; i++) {
        char header[64];
        snprintf(header, sizeof header, "X-Session-ID: chat %d\r\n", i % 8);
        uint64_t before = c.n_added;
        ck_assert_int_eq(ask_with("POST", "/inference/v1/generate", header,
                                  "{\"token_ids\":[1],\"sampling_params\":{\"max_tokens\":1}}"),
                         200);
        ck_assert_uint_eq(c.n_added, before + 1);
        uint32_t rank = c.last_rank;
        used[rank] = true;
        if (i < 8) {
            home[i] = rank;
        } else {
            ck_assert_uint_eq(home[i - 8], rank);
        }
    }
    ck_assert(used[0] && used[1]);
}
END_TEST

static const char stream_body[] = "{\"prompt\":\"hi\",\"max_tokens\":4,\"stream\":true}";

START_TEST(test_stream)
{
    cli_t cli;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "", stream_body);
    wait_for(&cli, "data: [DONE]\n\n\r\n0\r\n\r\n");
    ck_assert_ptr_nonnull(strstr(cli.text, "HTTP/1.1 200 OK\r\n"));
    ck_assert_ptr_nonnull(strstr(cli.text, "text/event-stream"));
    ck_assert_ptr_nonnull(strstr(cli.text, "\"text\":\"d\""));
    ck_assert_ptr_nonnull(strstr(cli.text, "\"weight_versions\":[{\"version\":\"v1\",\"epoch\":3,"
                                           "\"start\":0,\"end\":4}]"));
    /* the connection goes on */
    cli.len = 0;
    cli.text[0] = '\0';
    const char *body;
    cli_request(&cli, "GET", "/health", "", "");
    ck_assert_int_eq(cli_reply(&cli, &body), 200);
    cli_close(&cli);
}
END_TEST

START_TEST(test_stream_through_a_pause)
{
    cli_t cli;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "",
                "{\"prompt\":\"hi\",\"max_tokens\":500,"
                "\"stream\":true}");
    wait_for(&cli, "\"text\":\"a\"");
    ck_assert_int_eq(ask("POST", "/pause?mode=keep", ""), 200);
    turn(&cli);
    turn(&cli);
    turn(&cli);
    size_t len = cli.len;
    for (int i = 0; i < 100; i++) {
        turn(&cli);
    }
    ck_assert_uint_eq(cli.len, len);
    ck_assert(!cli.closed);
    ck_assert_int_eq(ask("POST", "/resume", ""), 200);
    wait_for(&cli, "data: [DONE]");
    cli_close(&cli);
}
END_TEST

START_TEST(test_disconnect_aborts)
{
    cli_t cli;
    c.hold = true;
    for (int stream = 0; stream < 2; stream++) {
        uint64_t before = c.n_aborted;
        cli_open(&cli);
        cli_request(&cli, "POST", "/v1/completions", "",
                    stream ? stream_body : "{\"prompt\":[[1],[2]],\"n\":2}");
        uint64_t n = stream ? 1 : 4;
        while (c.n_added < before + n) {
            turn(&cli);
        }
        cli_close(&cli);
        while (c.n_aborted < before + n) {
            turn(NULL);
        }
    }
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
}
END_TEST

START_TEST(test_disconnect_while_streaming)
{
    for (uint64_t i = 0; i < 10; i++) {
        cli_t cli;
        cli_open(&cli);
        cli_request(&cli, "POST", "/v1/completions", "",
                    "{\"prompt\":\"hi\",\"max_tokens\":4000,\"stream\":true,\"n\":3}");
        wait_for(&cli, "\"text\":\"c\"");
        if (i % 2 == 0) { /* with a reset instead of an orderly close */
            struct linger hard = {1, 0};
            setsockopt(cli.fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        }
        cli_close(&cli);
        while (c.n_aborted < 3 * (i + 1)) {
            turn(NULL);
        }
    }
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
}
END_TEST

START_TEST(test_control_call_outlives_its_client)
{
    cli_t cli;
    c.silent = true;
    cli_open(&cli);
    cli_request(&cli, "POST", "/pause?timeout_s=0.1", "", "");
    turn(&cli);
    turn(&cli);
    cli_close(&cli);
    uint64_t end = lk_env_now_ns(lk_env_real()) + 200 * LK_MS_NS;
    while (lk_env_now_ns(lk_env_real()) < end) {
        turn(NULL);
    }
    c.silent = false;
    ck_assert_int_eq(ask("POST", "/resume", ""), 200);
}
END_TEST

START_TEST(test_slow_reader_is_cut)
{
    cli_t cli;
    cli_open(&cli);
    int small = 4096;
    setsockopt(cli.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    c.tokens_per_turn = 250;
    cli.deaf = true;
    cli_request(&cli, "POST", "/v1/completions", "",
                "{\"prompt\":\"hi\",\"max_tokens\":4000,\"stream\":true,\"logprobs\":0,"
                "\"return_token_ids\":true,\"n\":64}");
    while (c.n_aborted == 0) {
        turn(&cli);
    }
    cli_close(&cli);
    c.tokens_per_turn = 1;
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
}
END_TEST

START_TEST(test_dead_engine)
{
    cli_t cli;
    c.hold = true;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "X-data-parallel-rank: 1\r\n",
                "{\"prompt\":\"hi\"}");
    while (c.n_added == 0) {
        turn(&cli);
    }
    c.dead = "engine 1: silent for 5.0 s";
    const char *body;
    ck_assert_int_eq(cli_reply(&cli, &body), 503);
    ck_assert_ptr_nonnull(strstr(body, "engine 1: silent for 5.0 s"));
    cli_close(&cli);
    ck_assert_int_eq(ask("GET", "/health", ""), 503);
    ck_assert_str_eq(text_at("state", NULL), "dead");
    ck_assert_int_eq(ask("POST", "/pause", ""), 503);
    ck_assert_int_eq(ask("GET", "/weight_info", ""), 200); /* rank 0 still says what it has */
    ck_assert(json_is_false(json_object_get(held, "consistent")));
}
END_TEST

/* ---- hostile input ---- */

START_TEST(test_raw_requests)
{
    static const struct {
        const char *text;
        int status;
        const char *part;
        bool or_closed; /* libevent before Debian's deb12u1 hangs up without a word */
    } raw[] = {
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 0\r\n\r\n{}", 400,
         "Content-Length"},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\ncontent-length: 2\r\n\r\n{}", 400,
         "Content-Length"},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, ""},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: "
         "chunked\r\n\r\n{}",
         400, "", true},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413, ""},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a b\r\nContent-Length: 0\r\n\r\n",
         400, "Idempotency-Key"},
        {"POST /pause?%zz=%ff%fe HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 400, "query"},
        {"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n\xff\xfe\xfd\xfc", 400,
         "body"},
        {"GET /health HTTP/1.0\r\n\r\n", 200, "ok"},
        {"POST /resume HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
         "chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
         200, "resumed"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(raw); i++) {
        cli_t cli;
        cli_open(&cli);
        cli_send(&cli, raw[i].text);
        while (strstr(cli.text, "\r\n\r\n") == NULL && !cli.closed) {
            turn(&cli);
        }
        if (raw[i].or_closed && cli.closed && cli.len == 0) {
            cli_close(&cli);
            continue;
        }
        ck_assert_msg(cli.len > 9 && atoi(cli.text + 9) == raw[i].status, "%s -> %s", raw[i].text,
                      cli.text);
        for (int k = 0; k < 20; k++) {
            turn(&cli);
        }
        ck_assert_msg(strstr(cli.text, raw[i].part) != NULL, "%s -> %s", raw[i].text, cli.text);
        cli_close(&cli);
    }
    ck_assert(!c.paused);
}
END_TEST

START_TEST(test_oversized)
{
    cli_t cli;
    size_t n = 2 << 20;
    char *big = malloc(n);
    memset(big, 'x', n);
    /* headers */
    cli_open(&cli);
    cli_send(&cli, "GET /health HTTP/1.1\r\nHost: x\r\nX-Big: ");
    cli_send_bytes(&cli, big, 20000);
    cli_send(&cli, "\r\n\r\n");
    while (cli.len == 0 && !cli.closed) {
        turn(&cli);
    }
    ck_assert_msg(cli.closed || atoi(cli.text + 9) == 400, "%s", cli.text);
    cli_close(&cli);
    /* a body over the server's limit, without and with its length given */
    cli_open(&cli);
    cli_send(&cli, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n");
    wait_for(&cli, "HTTP/1.1 413");
    cli_close(&cli);
    /* and over the route's own */
    cli_open(&cli);
    cli_send(&cli, "POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n");
    cli_send_bytes(&cli, big, 70000);
    const char *body;
    ck_assert_int_eq(cli_reply(&cli, &body), 413);
    ck_assert_ptr_nonnull(strstr(body, "at most 65536"));
    cli_close(&cli);
    free(big);
    ck_assert_int_eq(ask("GET", "/health", ""), 200);
}
END_TEST

/* Whoever watches this process is told before a body is parsed that may take seconds. */
START_TEST(test_long_work_is_announced)
{
    size_t n = API_LONG_WORK_BYTES;
    char *body = malloc(n + 1);
    memset(body, 'a', n);
    memcpy(body, "{\"prompt\":\"", 11);
    strcpy(body + n - 2, "\"}");
    ck_assert_int_eq(ask("POST", "/v1/completions", "{\"prompt\":[]}"), 400);
    ck_assert_uint_eq(c.patience_begins, 0);
    ck_assert_int_eq(ask("POST", "/v1/completions", body), 400);
    ck_assert_uint_eq(c.patience_begins, 1);
    ck_assert(!c.patience);
    free(body);
}
END_TEST

START_TEST(test_pipelining)
{
    cli_t cli;
    cli_open(&cli);
    cli_send(&cli, "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
                   "POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                   "GET /is_paused HTTP/1.1\r\nHost: x\r\n\r\n");
    wait_for(&cli, "{\"is_paused\":true}");
    const char *version = strstr(cli.text, "\"version\""), *paused = strstr(cli.text, "\"paused\"");
    ck_assert(version != NULL && paused != NULL && version < paused);
    cli_close(&cli);
}
END_TEST

/* ---- end ---- */

START_TEST(test_stop_ends_streams_with_what_they_have)
{
    cli_t cli;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "",
                "{\"prompt\":\"hi\",\"max_tokens\":4000,\"stream\":true}");
    wait_for(&cli, "\"text\":\"a\"");
    frontend_stop(c.frontend, "test");
    frontend_stop(c.frontend, "again");
    wait_for(&cli, "\"finish_reason\":\"abort\"");
    wait_for(&cli, "data: [DONE]");
    while (!c.ended) {
        turn(&cli);
    }
    ck_assert_int_eq(c.end.status, LK_OK);
    cli_close(&cli);
}
END_TEST

static void setup_drain(void)
{
    static char *const flags[] = {(char *)"--shutdown-timeout", (char *)"60", NULL};
    setup_flags(false, flags);
}

START_TEST(test_stop_lets_requests_finish)
{
    cli_t cli;
    cli_open(&cli);
    cli_request(&cli, "POST", "/v1/completions", "", "{\"prompt\":\"hi\",\"max_tokens\":200}");
    while (c.n_added == 0) {
        turn(&cli);
    }
    frontend_stop(c.frontend, "test");
    const char *body;
    ck_assert_int_eq(cli_reply(&cli, &body), 200);
    ck_assert_ptr_nonnull(strstr(body, "\"finish_reason\":\"length\""));
    while (!c.ended) {
        turn(&cli);
    }
    cli_close(&cli);
}
END_TEST

START_TEST(test_refuses_open_hosts)
{
    lk_config_t config;
    lk_error_t err;
    config_defaults(&config);
    config.coordinator_address = "ipc://@x";
    ck_ok(frontend_check_config(&config, &err));
    config.host = "0.0.0.0";
    ck_assert_int_eq(frontend_check_config(&config, &err), LK_ERR_INVALID);
    config.api_key = "a";
    ck_assert_int_eq(frontend_check_config(&config, &err), LK_ERR_INVALID);
    config.admin_key = "b";
    ck_ok(frontend_check_config(&config, &err));
    char long_key[257];
    memset(long_key, 'k', sizeof long_key - 1);
    long_key[256] = '\0';
    config.admin_key = long_key; /* no call could bring it */
    ck_assert_int_eq(frontend_check_config(&config, &err), LK_ERR_INVALID);
    config.admin_key = long_key + 1;
    ck_ok(frontend_check_config(&config, &err));
    config.api_key = config.admin_key = "";
    config.insecure = true;
    ck_ok(frontend_check_config(&config, &err));
}
END_TEST

START_TEST(test_refuses_open_endpoints)
{
    static const struct {
        const char *address;
        bool local;
    } cases[] = {
        {"", true},
        {"ipc://@lockstep-trainer", true},
        {"tcp://127.0.0.1:7100", true},
        {"tcp://[::1]:7100", true},
        {"tcp://localhost:*", true},
        {"tcp://*:7100", false},
        {"tcp://0.0.0.0:7100", false},
        {"tcp://127.example.org:7100", false},
        {"tcp://[::]:7100", false},
        {"tcp://eth0:7100", false},
        {"tcp://7100", false},
        {"pgm://eth0;239.1.1.1:7100", false},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        lk_config_t config;
        lk_error_t err;
        config_defaults(&config);
        config.coordinator_address = "ipc://@x";
        config.trainer_endpoint = cases[i].address;
        lk_status_t want = cases[i].local ? LK_OK : LK_ERR_INVALID;
        ck_assert_msg(frontend_check_config(&config, &err) == want, "%s", cases[i].address);
        config.admin_key = "k";
        ck_ok(frontend_check_config(&config, &err));
        config.admin_key = "";
        config.insecure = true;
        ck_ok(frontend_check_config(&config, &err));
    }
}
END_TEST

/* ---- the trainer's socket ---- */

static lk_port_t *trainer;

static lk_status_t from_msgpack(const void *data, size_t len, json_t **out, lk_error_t *err)
{
    static const wire_limits_t wire_limits = {WIRE_MAX_BODY, WIRE_MAX_OBJECTS, WIRE_MAX_DEPTH};
    wire_doc_t doc = {0};
    LK_RETURN_IF_ERROR(wire_doc_init(&doc, data, len, &wire_limits, err));
    lk_status_t status = wire_to_json(doc.root, out, err);
    wire_doc_fini(&doc);
    return status;
}

static void trainer_send(uint64_t id, const char *json)
{
    json_t *map = json_loads(json, 0, NULL);
    ck_assert_ptr_nonnull(map);
    lk_buf_t body;
    lk_buf_init(&body, 0);
    wire_writer_t writer = wire_writer(&body);
    wire_put_json(&writer, map);
    port_frame_t frames[2] = {{&id, 8}, {body.data, body.len}};
    lk_error_t err;
    ck_ok(port_send(trainer, NULL, frames, 2, &err));
    lk_buf_fini(&body);
    json_decref(map);
}

/* The next reply in `held`; returns its id. */
static uint64_t trainer_recv(void)
{
    port_msg_t in;
    lk_error_t err = LK_ERROR_INIT;
    while (port_recv(trainer, &in, &err) == LK_INPROGRESS) {
        turn(NULL);
    }
    ck_assert_uint_eq(in.n_frames, 2);
    uint64_t id;
    memcpy(&id, in.frames[0].data, 8);
    json_decref(held);
    ck_ok(from_msgpack(in.frames[1].data, in.frames[1].len, &held, &err));
    port_msg_fini(trainer, &in);
    return id;
}

static int trainer_ask(uint64_t id, const char *json)
{
    trainer_send(id, json);
    ck_assert_uint_eq(trainer_recv(), id);
    return (int)json_integer_value(json_object_get(held, "status"));
}

static void trainer_open(void)
{
    trainer = fcl_open(&c, PORT_DEALER, false, c.trainer);
}

START_TEST(test_trainer_calls)
{
    trainer_open();
    ck_assert_int_eq(trainer_ask(7, "{\"call\":\"get_world_size\",\"include_dp\":true}"), 200);
    ck_assert_int_eq(json_integer_value(json_object_get(held, "world_size")), 2);
    ck_assert_int_eq(trainer_ask(8, "{\"call\":\"pause\",\"mode\":\"keep\",\"clear_cache\":false}"),
                     200);
    ck_assert_str_eq(text_at("state", NULL), "paused");
    ck_assert(c.paused);
    ck_assert_int_eq(trainer_ask(9, "{\"call\":\"start_weight_update\"}"), 200);
    ck_assert_str_eq(text_at("message", NULL), "Weight update started");
    ck_assert_int_eq(trainer_ask(10,
                                 "{\"call\":\"update_weights\",\"update_info\":{\"names\":[\"a\"]},"
                                 "\"idempotency_key\":\"u1\"}"),
                     200);
    ck_assert_str_eq(c.last_spec, "{\"update_info\":{\"names\":[\"a\"]}}");
    c.update_status = LK_ERR_STATE;
    c.update_text = "no";
    ck_assert_int_eq(trainer_ask(11,
                                 "{\"call\":\"update_weights\",\"update_info\":{\"names\":[\"a\"]},"
                                 "\"idempotency_key\":\"u1\"}"),
                     200);
    ck_assert_int_eq(
        trainer_ask(12, "{\"call\":\"finish_weight_update\",\"weight_version\":\"x\"}"), 409);
    ck_assert_str_eq(text_at("error", "message"), "no");
    ck_assert_int_eq(trainer_ask(13, "{\"call\":\"resume\"}"), 200);
    ck_assert_int_eq(trainer_ask(14, "{\"call\":\"weight_info\"}"), 200);
    ck_assert_int_eq(trainer_ask(15, "{\"call\":\"pause\",\"mode\":\"hard\"}"), 400);
    ck_assert_str_eq(text_at("error", "param"), "mode");
    ck_assert_int_eq(trainer_ask(16, "{\"call\":\"completions\"}"), 404);
    ck_assert_int_eq(trainer_ask(17, "{\"x\":1}"), 404);
    ck_assert_int_eq(trainer_ask(18, "[1,2]"), 400);
    ck_assert_int_eq(trainer_ask(19, "{\"call\":\"resume\",\"admin_key\":5}"), 400);
    /* answered as they end */
    c.silent = true;
    trainer_send(20, "{\"call\":\"pause\",\"timeout_s\":0.2}");
    trainer_send(21, "{\"call\":\"health\"}");
    ck_assert_uint_eq(trainer_recv(), 21);
    ck_assert_uint_eq(trainer_recv(), 20);
    port_destroy(&trainer);
}
END_TEST

/* The arguments as one text go on to the ranks as they are. */
START_TEST(test_trainer_json)
{
    trainer_open();
    ck_assert_int_eq(trainer_ask(1, "{\"call\":\"update_weights\",\"idempotency_key\":\"j1\","
                                    "\"json\":\"{ \\\"update_info\\\" : {\\\"a\\\":1}}\"}"),
                     200);
    ck_assert_str_eq(c.last_spec, "{ \"update_info\" : {\"a\":1}}");
    c.update_status = LK_ERR_STATE;
    c.update_text = "no";
    /* the same call, whatever its form */
    ck_assert_int_eq(trainer_ask(2, "{\"call\":\"update_weights\",\"idempotency_key\":\"j1\","
                                    "\"update_info\":{\"a\":1}}"),
                     200);
    ck_assert_int_eq(trainer_ask(3, "{\"call\":\"update_weights\",\"idempotency_key\":\"j1\","
                                    "\"json\":\"{\\\"update_info\\\":{\\\"a\\\":2}}\"}"),
                     400);
    ck_assert_str_eq(text_at("error", "param"), "Idempotency-Key");
    ck_assert_int_eq(
        trainer_ask(4, "{\"call\":\"pause\",\"json\":\"{\\\"mode\\\":\\\"keep\\\"}\"}"), 200);
    ck_assert_int_eq(trainer_ask(5, "{\"call\":\"resume\",\"json\":\"\"}"), 200);
    static const char *const bad[][2] = {
        {"{\"call\":\"update_weights\",\"json\":5}", "json"},
        {"{\"call\":\"update_weights\",\"json\":\"{}\",\"update_info\":{}}", "json"},
        {"{\"call\":\"update_weights\",\"json\":\"\"}", "body"},
        {"{\"call\":\"update_weights\",\"json\":\"[]\"}", "body"},
        {"{\"call\":\"update_weights\",\"json\":\"{\\\"a\\\":1,\\\"a\\\":2}\"}", "body"},
        {"{\"call\":\"update_weights\",\"json\":\"{}\"}", "update_info"},
    };
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        ck_assert_int_eq(trainer_ask(10 + i, bad[i][0]), 400);
        ck_assert_str_eq(text_at("error", "param"), bad[i][1]);
    }
    port_destroy(&trainer);
}
END_TEST

START_TEST(test_trainer_garbage)
{
    trainer_open();
    lk_error_t err;
    static const uint8_t id[8] = {1}, bomb[] = {0xdd, 0x0f, 0xff, 0xff, 0xff}, bin[] = {0xc4, 1, 5},
                         nan[] = {0x81, 0xa1, 'x', 0xcb, 0x7f, 0xf8, 0, 0, 0, 0, 0, 0};
    const port_frame_t bad[][2] = {{{id, 3}, {bomb, 1}}, {{NULL, 0}, {NULL, 0}}};
    for (size_t i = 0; i < LK_ARRAY_LEN(bad); i++) {
        ck_ok(port_send(trainer, NULL, bad[i], 2, &err));
    }
    ck_ok(port_send(trainer, NULL, bad[0], 1, &err));
    const port_frame_t answered[][2] = {{{id, 8}, {bomb, sizeof bomb}},
                                        {{id, 8}, {NULL, 0}},
                                        {{id, 8}, {bin, sizeof bin}},
                                        {{id, 8}, {nan, sizeof nan}}};
    for (size_t i = 0; i < LK_ARRAY_LEN(answered); i++) {
        ck_ok(port_send(trainer, NULL, answered[i], 2, &err));
        ck_assert_uint_eq(trainer_recv(), 1);
        ck_assert_int_eq(json_integer_value(json_object_get(held, "status")), 400);
    }
    port_destroy(&trainer);
}
END_TEST

START_TEST(test_trainer_key)
{
    trainer_open();
    ck_assert_int_eq(trainer_ask(1, "{\"call\":\"pause\"}"), 401);
    ck_assert_int_eq(trainer_ask(2, "{\"call\":\"pause\",\"admin_key\":\"user-key\"}"), 401);
    ck_assert(!c.paused);
    ck_assert_int_eq(trainer_ask(3, "{\"call\":\"pause\",\"admin_key\":\"root-key\"}"), 200);
    port_destroy(&trainer);
}
END_TEST

static void drop_held(void)
{
    json_decref(held);
    held = NULL;
    teardown();
}

static TCase *group(Suite *suite, const char *name, void (*up)(void))
{
    TCase *tc = tcase_create(name);
    tcase_add_checked_fixture(tc, up, drop_held);
    tcase_set_timeout(tc, 30);
    suite_add_tcase(suite, tc);
    return tc;
}

Suite *test_suite(void)
{
    Suite *suite = suite_create("http");
    TCase *tc = group(suite, "open", setup);
    tcase_add_test(tc, test_information);
    tcase_add_test(tc, test_pause_and_resume);
    tcase_add_test(tc, test_the_same_large_body);
    tcase_add_test(tc, test_weight_calls);
    tcase_add_test(tc, test_paths_and_methods);
    tcase_add_test(tc, test_idempotency);
    tcase_add_test(tc, test_completion);
    tcase_add_test(tc, test_session_header);
    tcase_add_test(tc, test_stream);
    tcase_add_test(tc, test_stream_through_a_pause);
    tcase_add_test(tc, test_disconnect_aborts);
    tcase_add_test(tc, test_disconnect_while_streaming);
    tcase_add_test(tc, test_control_call_outlives_its_client);
    tcase_add_test(tc, test_slow_reader_is_cut);
    tcase_add_test(tc, test_dead_engine);
    tcase_add_test(tc, test_raw_requests);
    tcase_add_test(tc, test_oversized);
    tcase_add_test(tc, test_long_work_is_announced);
    tcase_add_test(tc, test_pipelining);
    tcase_add_test(tc, test_stop_ends_streams_with_what_they_have);
    tcase_add_test(tc, test_refuses_open_hosts);
    tcase_add_test(tc, test_refuses_open_endpoints);
    tcase_add_test(tc, test_trainer_calls);
    tcase_add_test(tc, test_trainer_json);
    tcase_add_test(tc, test_trainer_garbage);
    TCase *zmq = group(suite, "zmq", setup_zmq);
    tcase_add_test(zmq, test_information);
    tcase_add_test(zmq, test_pause_and_resume);
    tcase_add_test(zmq, test_completion);
    tcase_add_test(zmq, test_stream);
    tcase_add_test(zmq, test_disconnect_aborts);
    tcase_add_test(zmq, test_trainer_calls);
    tcase_add_test(zmq, test_trainer_garbage);
    TCase *keys = group(suite, "keys", setup_keys);
    tcase_add_test(keys, test_keys);
    tcase_add_test(keys, test_trainer_key);
    tcase_add_test(group(suite, "drain", setup_drain), test_stop_lets_requests_finish);
    return suite;
}
