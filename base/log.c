#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    char who[32];
    lk_log_level_t level;
    lk_log_format_t format;
} logger = {.who = "lockstep", .level = LK_LOG_INFO, .format = LK_LOG_TEXT};

static const char *const level_names[] = {"debug", "info", "warning", "error"};

void lk_log_init(const char *who, lk_log_level_t level, lk_log_format_t format)
{
    snprintf(logger.who, sizeof logger.who, "%s", who);
    logger.level = level;
    logger.format = format;
}

/* Escapes for a JSON string; control characters would otherwise forge log lines in text mode too.
 */
static size_t escape(char *out, size_t room, const char *text)
{
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p != '\0' && n + 7 < room; p++) {
        if (*p == '"' || *p == '\\') {
            if (logger.format == LK_LOG_JSON) {
                out[n++] = '\\';
            }
            out[n++] = (char)*p;
        } else if (*p < 0x20 || *p == 0x7f) {
            n += (size_t)snprintf(out + n, room - n, "\\u%04x", *p);
        } else {
            out[n++] = (char)*p;
        }
    }
    out[n] = '\0';
    return n;
}

void lk_log(lk_log_level_t level, const char *fmt, ...)
{
    if (level < logger.level) {
        return;
    }
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    char safe[4096];
    escape(safe, sizeof safe, text);

    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    struct tm tm;
    gmtime_r(&now.tv_sec, &tm);
    char when[40];
    size_t w = strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(when + w, sizeof when - w, ".%03ldZ", now.tv_nsec / 1000000);

    char line[4608];
    int n;
    if (logger.format == LK_LOG_JSON) {
        n = snprintf(
            line, sizeof line,
            "{\"time\":\"%s\",\"level\":\"%s\",\"who\":\"%s\",\"pid\":%d,\"msg\":\"%s\"}\n", when,
            level_names[level], logger.who, (int)getpid(), safe);
    } else {
        n = snprintf(line, sizeof line, "%s %-7s [%s] %s\n", when, level_names[level], logger.who,
                     safe);
    }
    if (n > (int)sizeof line - 1) {
        n = (int)sizeof line - 1;
        line[n - 1] = '\n';
    }
    /* One write per line, so that lines of several processes do not interleave. */
    ssize_t done = write(STDERR_FILENO, line, (size_t)n);
    (void)done; /* nobody is left to tell */
}
