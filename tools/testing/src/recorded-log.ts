import type { Log, LogFields } from "@kv/interface";

/** A log that keeps what is logged. */
export function recordedLog() {
  const events: { readonly event: string; readonly fields: LogFields }[] = [];
  const note = (event: string, fields: LogFields = {}) => void events.push({ event, fields });
  const log: Log = { debug: note, info: note, warn: note, error: note };
  return {
    log,
    events,
    logged: (name: string): LogFields[] =>
      events.filter(({ event }) => event === name).map(({ fields }) => fields),
  };
}
