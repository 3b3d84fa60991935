import { writeFile } from "node:fs/promises";
import { KvError } from "@kv/interface";
import { print, printError } from "@kv/program";
import type { Command } from "commander";
import { chooseRequest, readTraceFile, requestTraces } from "../trace/request-trace.js";
import { traceSvg } from "../trace/trace-svg.js";
import { traceText } from "../trace/trace-text.js";

interface TraceFlags {
  request?: string;
  svg?: string;
}

export function addTrace(program: Command): void {
  program
    .command("trace")
    .description("draw one request of a trace file: where its time went, by process")
    .argument(
      "<file>",
      "lines of OTLP JSON, such as npm run demo -- --trace FILE and kv-proxy --trace FILE write",
    )
    .option(
      "--request <id>",
      "the request's id or trace id, or the beginning of one (default: the slowest request)",
    )
    .option("--svg <file>", "write a drawing as well")
    .action(async (file: string, { request, svg }: TraceFlags) => {
      const warn = (message: string) => printError(`kv-peer: ${message}\n`);
      const traces = requestTraces(await readTraceFile(file, warn));
      const trace = chooseRequest(traces, request);
      if (svg !== undefined)
        await writeFile(svg, traceSvg(trace), { mode: 0o600 }).catch((cause: unknown) => {
          throw new KvError("KV_CONFIG_INVALID", `${svg} cannot be written: ${String(cause)}`, {
            cause,
          });
        });
      print(traceText(trace));
      if (traces.length > 1) print(`${traces.length - 1} more requests in ${file}\n`);
    });
}
