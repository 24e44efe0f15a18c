#include "api_frontend/tokenizer/tokenizer.h"
#include "base/check.h"
#include "deploy/tool/tool.h"
#include "engine_core/exec/model_maker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    size_t offset;
    const char *help;
} switches[] = {
    {"--tie-word-embeddings", offsetof(model_maker_t, tie_word_embeddings),
     "lm_head is the embedding"},
    {"--attention-bias", offsetof(model_maker_t, attention_bias), "biases of q, k, v, o"},
    {"--norm-topk-prob", offsetof(model_maker_t, norm_topk_prob), "normalised router weights"},
    {"--llama3-rope", offsetof(model_maker_t, llama3_rope), "llama3 rope scaling (llama)"},
};

static void usage(FILE *to)
{
    fprintf(to,
            "usage: lockstep make-model --arch llama|qwen2|qwen3|qwen3_moe --out DIR [flags]\n\n"
            "  --seed N                     of the weights [0]\n"
            "  --dtype bfloat16|float32|float16   of the file [bfloat16]\n");
#define X(field, flag, least, most)                                                                \
    fprintf(to, "  --%-26s %llu to %llu\n", flag " N", (unsigned long long)(least),                \
            (unsigned long long)(most));
    MODEL_MAKER_SIZES(X)
#undef X
    for (size_t i = 0; i < LK_ARRAY_LEN(switches); i++) {
        fprintf(to, "  %-28s %s; --no-... for off\n", switches[i].name, switches[i].help);
    }
}

static lk_status_t parse_u64(const char *flag, const char *text, uint64_t *out, lk_error_t *err)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0) {
        return lk_error_set(err, LK_ERR_INVALID, "%s takes a whole number, not '%s'", flag, text);
    }
    return LK_OK;
}

/* A switch or its --no- form; false if arg is none. */
static bool set_switch(model_maker_t *maker, const char *arg)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(switches); i++) {
        bool negated = strncmp(arg, "--no-", 5) == 0 && strcmp(arg + 5, switches[i].name + 2) == 0;
        if (negated || strcmp(arg, switches[i].name) == 0) {
            *(bool *)((char *)maker + switches[i].offset) = !negated;
            return true;
        }
    }
    return false;
}

static lk_status_t parse(int argc, char **argv, model_maker_t *maker, const char **dir,
                         lk_error_t *err)
{
    model_arch_t arch = ARCH_QWEN3_MOE;
    bool have_arch = false;
    for (int i = 1; i + 1 < argc; i++) { /* the architecture sets the defaults: first */
        if (strcmp(argv[i], "--arch") == 0) {
            have_arch = model_maker_arch(argv[i + 1], &arch);
            if (!have_arch) {
                return lk_error_set(err, LK_ERR_INVALID, "--arch %s is not known", argv[i + 1]);
            }
        }
    }
    if (!have_arch) {
        return lk_error_set(err, LK_ERR_INVALID, "--arch is needed");
    }
    model_maker_init(maker, arch);
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (set_switch(maker, arg)) {
            continue;
        }
        if (strncmp(arg, "--", 2) != 0 || i + 1 >= argc) {
            return lk_error_set(err, LK_ERR_INVALID, "%s %s", arg,
                                i + 1 >= argc ? "needs a value" : "is not a flag");
        }
        const char *value = argv[++i];
        if (strcmp(arg, "--arch") == 0) {
            continue;
        }
        if (strcmp(arg, "--out") == 0) {
            *dir = value;
        } else if (strcmp(arg, "--dtype") == 0) {
            if (!dtype_parse(value, &maker->dtype) ||
                (maker->dtype != LK_DTYPE_BF16 && maker->dtype != LK_DTYPE_F32 &&
                 maker->dtype != LK_DTYPE_F16)) {
                return lk_error_set(err, LK_ERR_INVALID,
                                    "--dtype must be bfloat16, float32 or float16, not '%s'",
                                    value);
            }
        } else {
            uint64_t number;
            LK_RETURN_IF_ERROR(parse_u64(arg, value, &number, err));
            if (strcmp(arg, "--seed") == 0) {
                maker->seed = number;
            } else {
                LK_RETURN_IF_ERROR(model_maker_set(maker, arg + 2, number, err));
            }
        }
    }
    return *dir != NULL ? LK_OK : lk_error_set(err, LK_ERR_INVALID, "--out is needed");
}

int tool_make_model(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
    }
    model_maker_t maker;
    const char *dir = NULL;
    lk_error_t err = LK_ERROR_INIT;
    if (parse(argc, argv, &maker, &dir, &err) != LK_OK) {
        fprintf(stderr, "lockstep: %s\n", err.text);
        return 2;
    }
    if (model_maker_write(&maker, dir, &err) != LK_OK ||
        tokenizer_write_bytes(dir, maker.vocab_size, &err) != LK_OK) {
        fprintf(stderr, "lockstep: %s\n", err.text);
        return 1;
    }
    printf("%s\n", dir);
    return 0;
}
