/* Reads the files and puts a tokenizer together. */
#include "api_frontend/tokenizer/tokenizer_load.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static lk_status_t load_sections(tokenizer_t *t, json_t *root, json_t *config, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(tokenizer_load_model(t, root, err));
    LK_RETURN_IF_ERROR(tokenizer_load_normalizer(t, root, err));
    LK_RETURN_IF_ERROR(tokenizer_load_pretokenizer(t, root, err));
    LK_RETURN_IF_ERROR(tokenizer_load_decoder(root, err));
    LK_RETURN_IF_ERROR(tokenizer_load_added(t, root, config, err));
    return tokenizer_load_post_processor(t, root, err);
}

static lk_status_t load_config_sections(tokenizer_t *t, json_t *config, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(tokenizer_load_config_added(t, config, err));
    return tokenizer_load_config(t, config, err);
}

lk_status_t tokenizer_parse(const char *json, size_t json_len, const char *config,
                            size_t config_len, tokenizer_t **out, lk_error_t *err)
{
    lk_error_t unheard;
    err = err == NULL ? &unheard : err;
    json_t *root = NULL, *config_root = NULL;
    tokenizer_t *t = calloc(1, sizeof *t);
    if (t == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a tokenizer");
    }
    vocab_init(&t->vocab);
    t->bos_id = t->eos_id = TOKENIZER_NO_ID;
    const char *file = "tokenizer.json";
    lk_status_t status = json_in_parse(json, json_len, &root, err);
    if (status == LK_OK && config != NULL) {
        file = "tokenizer_config.json";
        status = json_in_parse(config, config_len, &config_root, err);
    }
    if (status == LK_OK) {
        file = "tokenizer.json";
        status = load_sections(t, root, config_root, err);
    }
    if (status == LK_OK && config_root != NULL) {
        file = "tokenizer_config.json";
        status = load_config_sections(t, config_root, err);
    }
    json_decref(root);
    json_decref(config_root);
    if (status != LK_OK) {
        tokenizer_destroy(&t);
        return lk_error_prefix(err, "%s", file);
    }
    *out = t;
    return LK_OK;
}

/* Reads a regular file whole; *data is malloc'ed. */
static lk_status_t read_file(const char *path, char **data, size_t *len, lk_error_t *err)
{
    struct stat st;
    char *buf = NULL;
    lk_status_t status = LK_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        bool absent = errno == ENOENT || errno == ENOTDIR;
        return lk_error_set(err, absent ? LK_ERR_NOT_FOUND : LK_ERR_IO, "%s: %s", path,
                            strerror(errno));
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = lk_error_set(err, LK_ERR_INVALID, "%s is not a regular file", path);
        goto err_close;
    }
    if (st.st_size > TOKENIZER_MAX_FILE) {
        status = lk_error_set(err, LK_ERR_TOO_LARGE, "%s has %lld bytes, allowed are %u", path,
                              (long long)st.st_size, TOKENIZER_MAX_FILE);
        goto err_close;
    }
    size_t size = (size_t)st.st_size, n = 0;
    buf = malloc(size + 1);
    if (buf == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "%s: out of memory", path);
        goto err_close;
    }
    while (n < size) {
        ssize_t got = read(fd, buf + n, size - n);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            status = lk_error_set(err, LK_ERR_IO, "%s: %s", path,
                                  got < 0 ? strerror(errno) : "the file became shorter");
            goto err_close;
        }
        n += (size_t)got;
    }
    *data = buf;
    *len = n;
    buf = NULL;
err_close:
    free(buf);
    close(fd);
    return status;
}

static lk_status_t join_path(const char *dir, const char *name, char out[PATH_MAX], lk_error_t *err)
{
    if (snprintf(out, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX) {
        return lk_error_set(err, LK_ERR_INVALID, "the path of the tokenizer is too long");
    }
    return LK_OK;
}

lk_status_t tokenizer_load(const char *path, tokenizer_t **out, lk_error_t *err)
{
    struct stat st;
    char file[PATH_MAX], *json = NULL, *config = NULL;
    size_t json_len, config_len = 0;
    bool is_dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (is_dir) {
        LK_RETURN_IF_ERROR(join_path(path, "tokenizer.json", file, err));
    }
    LK_RETURN_IF_ERROR(read_file(is_dir ? file : path, &json, &json_len, err));
    lk_status_t status = LK_OK;
    if (is_dir) {
        status = join_path(path, "tokenizer_config.json", file, err);
        if (status == LK_OK) {
            status = read_file(file, &config, &config_len, err);
            status = status == LK_ERR_NOT_FOUND ? LK_OK : status;
        }
    }
    if (status == LK_OK) {
        status = tokenizer_parse(json, json_len, config, config_len, out, err);
        if (status != LK_OK) {
            lk_error_prefix(err, "%s", path);
        }
    }
    free(json);
    free(config);
    return status;
}
