import { KvError, type Log, type LogFields } from "@kv/interface";
import { type DestinationStream, pino, stdTimeFunctions } from "pino";

/** The levels of a program's log, and `silent`. */
export const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
/** The lowest level that is logged. */
export type LogLevel = (typeof LOG_LEVELS)[number];

/** A log whose level can change. */
export interface JsonLog extends Log {
  setLevel(level: LogLevel): void;
}

/** Logs each event as one line of JSON: `time`, `level`, `event`, `fixed` and its own fields. */
export function jsonLog(
  level: LogLevel,
  destination: DestinationStream,
  fixed: LogFields | null = null,
): JsonLog {
  const logger = pino(
    {
      level,
      base: fixed,
      messageKey: "event",
      timestamp: stdTimeFunctions.isoTime,
      formatters: { level: (label) => ({ level: label }) },
      serializers: { error: plainError },
    },
    destination,
  );
  const at =
    (name: "debug" | "info" | "warn" | "error") =>
    (event: string, fields: LogFields = {}) =>
      logger[name](fields, event);
  return {
    debug: at("debug"),
    info: at("info"),
    warn: at("warn"),
    error: at("error"),
    setLevel: (next) => {
      logger.level = next;
    },
  };
}

/** A cause may contain a request's text. */
function plainError(value: unknown): unknown {
  if (KvError.is(value)) return { code: value.code, message: value.message, hint: value.hint };
  return value instanceof Error ? { name: value.name, message: value.message } : value;
}
