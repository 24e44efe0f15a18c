/*
 * log.h: one line per event on standard error, as text or as JSON lines.
 *
 * Library code logs at DEBUG at most; programs and state machines log what an operator needs.
 * Never log a key, a token secret, or a prompt.
 */
#ifndef LK_BASE_LOG_H
#define LK_BASE_LOG_H

typedef enum { LK_LOG_DEBUG, LK_LOG_INFO, LK_LOG_WARN, LK_LOG_ERROR } lk_log_level_t;
typedef enum { LK_LOG_TEXT, LK_LOG_JSON } lk_log_format_t;

/* `who` names the process in every line ("engine 1"); copied. Call once, before threads. */
void lk_log_init(const char *who, lk_log_level_t level, lk_log_format_t format);
void lk_log(lk_log_level_t level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define LK_DEBUG(...) lk_log(LK_LOG_DEBUG, __VA_ARGS__)
#define LK_INFO(...) lk_log(LK_LOG_INFO, __VA_ARGS__)
#define LK_WARN(...) lk_log(LK_LOG_WARN, __VA_ARGS__)
#define LK_ERROR(...) lk_log(LK_LOG_ERROR, __VA_ARGS__)

#endif
