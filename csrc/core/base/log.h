/* log.h - log lines on stderr, with the prefix "spccl[rank] level: ". */
#ifndef SP_LOG_H
#define SP_LOG_H

typedef enum sp_log_level { SP_LOG_OFF, SP_LOG_ERROR, SP_LOG_WARN, SP_LOG_INFO, SP_LOG_DEBUG } sp_log_level;

/* Print one line. rank < 0: no rank is known yet. The first call reads SPCCL_LOG. Any thread may call it. */
void sp_log(sp_log_level level, int rank, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* True if lines of that level are printed. */
int sp_log_on(sp_log_level level);

#endif
