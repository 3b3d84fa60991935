import { readFileSync } from "node:fs";

interface Api {
  readonly routes: readonly string[];
  readonly headers: readonly string[];
  readonly answers: Readonly<Record<string, readonly string[]>>;
}

/** The API of each release of vLLM, as `tools/vllm/read_api.py` reads it from the sources. */
export const VLLM_APIS = Object.entries<Api>(
  JSON.parse(readFileSync(new URL("../../fixtures/vllm-api.json", import.meta.url), "utf8")),
);
