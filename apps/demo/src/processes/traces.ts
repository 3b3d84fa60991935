import type { Log, Tracer } from "@kv/interface";
import { openSpanOutput } from "@kv/program";
import { OtlpTracer } from "@kv/protocol";

export interface Traces {
  readonly tracer: Tracer | undefined;
  close(): Promise<void>;
}

/**
 * Spans go to `file`, and to the OTLP endpoint that the environment names. Errors: those of
 * `openSpanOutput`.
 */
export function openTraces(
  file: string | undefined,
  { service, instance, log }: { service: string; instance: string; log: Log },
): Traces {
  const output = openSpanOutput({ file, env: process.env, log });
  if (output === undefined) return { tracer: undefined, async close() {} };
  const tracer = new OtlpTracer({ service, instance, write: output.write });
  return {
    tracer,
    close() {
      tracer.close();
      return output.close();
    },
  };
}
