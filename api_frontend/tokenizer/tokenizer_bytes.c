/* The tokenizer that goes with made-up checkpoints: bytes, two special tokens, no merges. */
#include "api_frontend/tokenizer/byte_alphabet.h"
#include "api_frontend/tokenizer/tokenizer.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BYTE_LEVEL                                                                                 \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, "             \
    "\"use_regex\": true}"
#define SPECIAL(id, content)                                                                       \
    "    {\"id\": " #id ", \"content\": \"" content "\", \"single_word\": false, \"lstrip\": "     \
    "false, \"rstrip\": false, \"normalized\": false, \"special\": true}"

static void write_tokenizer(lk_buf_t *out)
{
    lk_buf_str(
        out,
        "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"
        "  \"added_tokens\": [\n" SPECIAL(256, "<|bos|>") ",\n" SPECIAL(
            257, "<|eos|>") "\n  ],\n"
                            "  \"normalizer\": null,\n  \"pre_tokenizer\": " BYTE_LEVEL ",\n"
                            "  \"post_processor\": " BYTE_LEVEL ",\n  \"decoder\": " BYTE_LEVEL
                            ",\n"
                            "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n"
                            "    \"unk_token\": null,\n    \"continuing_subword_prefix\": null,\n"
                            "    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
                            "    \"byte_fallback\": false,\n    \"vocab\": {");
    for (int b = 0; b < 256; b++) {
        char text[2];
        size_t len = byte_alphabet_encode((uint8_t)b, text);
        lk_buf_str(out, b == 0 ? "\n      " : ",\n      ");
        lk_buf_json_str(out, text, len);
        lk_buf_printf(out, ": %d", b);
    }
    lk_buf_str(out, "\n    },\n    \"merges\": []\n  }\n}\n");
}

static const char config_text[] = "{\n  \"add_bos_token\": false,\n  \"add_prefix_space\": false,\n"
                                  "  \"bos_token\": \"<|bos|>\",\n  \"eos_token\": \"<|eos|>\",\n"
                                  "  \"clean_up_tokenization_spaces\": false,\n"
                                  "  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n";

/* Writes beside the name, then renames: a reader never sees half a file. */
static lk_status_t write_file(const char *dir, const char *name, const void *data, size_t len,
                              lk_error_t *err)
{
    char path[PATH_MAX], part[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path ||
        snprintf(part, sizeof part, "%s/.%s.part", dir, name) >= (int)sizeof part) {
        return lk_error_set(err, LK_ERR_INVALID, "the path of the tokenizer is too long");
    }
    FILE *file = fopen(part, "we");
    if (file == NULL) {
        return lk_error_set(err, LK_ERR_IO, "%s: %s", part, strerror(errno));
    }
    bool written = fwrite(data, 1, len, file) == len;
    int why = errno;
    if (fclose(file) != 0) {
        why = written ? errno : why;
        written = false;
    }
    if (written && rename(part, path) != 0) {
        why = errno;
        written = false;
    }
    if (!written) {
        unlink(part);
        return lk_error_set(err, LK_ERR_IO, "%s: %s", path, strerror(why));
    }
    return LK_OK;
}

lk_status_t tokenizer_write_bytes(const char *dir, uint32_t vocab_size, lk_error_t *err)
{
    if (vocab_size < TOKENIZER_BYTES_MIN) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "vocab_size %u is too small for a byte-level tokenizer (%u tokens)",
                            vocab_size, TOKENIZER_BYTES_MIN);
    }
    lk_buf_t buf;
    lk_buf_init(&buf, 0);
    write_tokenizer(&buf);
    lk_status_t status = buf.failed ? lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory")
                                    : write_file(dir, "tokenizer.json", buf.data, buf.len, err);
    lk_buf_fini(&buf);
    if (status != LK_OK) {
        return status;
    }
    return write_file(dir, "tokenizer_config.json", config_text, sizeof config_text - 1, err);
}
