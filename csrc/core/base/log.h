/* log.h - levels, one line per event on stderr, prefix "spccl[rank] ". Base of the map. */
#ifndef SP_LOG_H
#define SP_LOG_H

typedef enum sp_log_level { SP_LOG_OFF, SP_LOG_ERROR, SP_LOG_WARN, SP_LOG_INFO, SP_LOG_DEBUG } sp_log_level;

/* rank < 0: no rank yet. SPCCL_LOG is read at the first call. Threads: any. */
void sp_log(sp_log_level level, int rank, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Would that level print? */
int sp_log_on(sp_log_level level);

#endif
