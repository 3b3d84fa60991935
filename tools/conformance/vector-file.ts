import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import type { VectorCase } from "./outcome.js";

/** vLLM's answer: the caches of a published config with some flags. */
export interface ModelLine {
  readonly config: string;
  readonly tp: number;
  readonly kv_cache_dtype: string;
  readonly prefix_caching?: boolean;
  /** vLLM's `method` and `num_speculative_tokens`, and a head's config. */
  readonly draft?: { readonly method: string; readonly tokens: number; readonly config?: unknown };
  readonly error?: string;
  readonly [field: string]: unknown;
}

/** `--only KEY=VALUE`: `in.KEY`, as JSON text, is VALUE. */
export interface Selection {
  readonly key: string;
  readonly value: string;
}

export interface NumberedCase {
  readonly line: number;
  readonly vector: VectorCase | undefined;
  readonly model?: ModelLine;
  readonly config?: unknown;
}

export function linesOf(path: string): readonly string[] {
  const bytes = readFileSync(path);
  const text = (path.endsWith(".gz") ? gunzipSync(bytes) : bytes).toString("utf8");
  return text.split("\n");
}

/** The line `{"meta": …}` is not a case. */
export function readVectors(path: string, only: readonly Selection[]): NumberedCase[] {
  const cases: NumberedCase[] = [];
  let configs: Readonly<Record<string, unknown>> = {};
  for (const [index, line] of linesOf(path).entries()) {
    if (line.trim() === "") continue;
    const vector = parse(line);
    if (vector !== undefined && "meta" in vector) {
      configs = "configs" in vector ? (vector.configs as typeof configs) : configs;
      continue;
    }
    const record = vector as Readonly<Record<string, unknown>> | undefined;
    const model = record !== undefined && isModelLine(record) ? record : undefined;
    const input = model ?? vector?.in;
    if (
      only.length > 0 &&
      (input === undefined || !only.every(({ key, value }) => isText(input[key], value)))
    )
      continue;
    cases.push({
      line: index + 1,
      vector: input === undefined || model !== undefined ? undefined : vector,
      ...(model === undefined ? {} : { model, config: configs[model.config] }),
    });
  }
  return cases;
}

function isModelLine(line: Readonly<Record<string, unknown>>): line is ModelLine {
  return typeof line["config"] === "string" && typeof line["tp"] === "number";
}

function isText(field: unknown, value: string): boolean {
  return (
    field !== undefined &&
    JSON.stringify(field) === value.replaceAll(/(?<=[[,{:])\s+|\s+(?=[\],}])/g, "")
  );
}

function parse(line: string): VectorCase | undefined {
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === "object" && value !== null ? (value as VectorCase) : undefined;
  } catch {
    return undefined;
  }
}
