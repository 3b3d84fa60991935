import { KvError, type Log, type LogFields } from "@kv/interface";
import { type DestinationStream, pino, stdTimeFunctions } from "pino";

/** The levels of a program's log, and `silent`. */
export const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
/** The least level that is logged. */
export type LogLevel = (typeof LOG_LEVELS)[number];

/**
 * A log that writes one line of JSON for each event: `time`, `level`, `event` and the event's
 * fields. Each request is logged when it ends.
 */
export function jsonLog(level: LogLevel, destination: DestinationStream): Log {
  const logger = pino(
    {
      level,
      base: null,
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
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}

/** The message of an error without its cause, which may contain a request's text. */
function plainError(value: unknown): unknown {
  if (KvError.is(value)) return { code: value.code, message: value.message, hint: value.hint };
  return value instanceof Error ? { name: value.name, message: value.message } : value;
}
