import { memoryTransport } from "@kv/transport-memory";
import { onTestFinished } from "vitest";
import { BlockPool } from "../../src/engine/cache/block-pool.js";
import { KvPool } from "../../src/engine/cache/kv-pool.js";
import { Engine } from "../../src/engine/engine.js";
import type { ServedInstance } from "../../src/http/generation.js";
import { InstanceServer, type InstanceServerOptions } from "../../src/http/server.js";
import type { Tokenizer } from "../../src/model/tokenizer/tokenizer.js";
import { arithmeticModel } from "./arithmetic-model.js";
import { scriptedConnector } from "./scripted-connector.js";

/** A tokenizer whose words are token ids. */
export const tokenizer: Tokenizer = {
  encode: (text) => Int32Array.from(text.split(" ").filter(Boolean), Number),
  decode: (tokens) => Array.from(tokens, (token) => ` ${token}`).join(""),
  encodeChat: (messages) =>
    Int32Array.from(messages.flatMap(({ content }) => content.split(" ").map(Number))),
};

/** Serves a scripted engine over HTTP until the test ends. */
export async function serve(
  given: Partial<ServedInstance> = {},
  options: InstanceServerOptions = {},
) {
  const model = arithmeticModel();
  const connector = scriptedConnector();
  const pool = new KvPool({
    transport: memoryTransport(),
    geometry: model.config,
    numBlocks: 64,
    blockSize: 4,
    tp: 1,
  });
  const engine = new Engine({ model, pool, blocks: new BlockPool({ numBlocks: 64 }), connector });
  const instance: ServedInstance = {
    engines: [engine],
    tokenizer,
    modelNames: ["tiny", "/models/tiny"],
    maxModelLen: 512,
    maxOutputTokens: 100,
    debug: false,
    ready: () => true,
    status: () => ({ outstanding: engine.outstanding() }),
    metrics: () => "kv_test 1\n",
    kvTransfers: () => ({ records: [] }),
    ...given,
  };
  const server = new InstanceServer(instance, options);
  const { url } = await server.listen("127.0.0.1", 0);
  onTestFinished(async () => {
    await engine.close();
    await server.close();
  });
  const post = (
    body: object,
    {
      path = "/v1/completions",
      headers = {},
      signal,
    }: { path?: string; headers?: Record<string, string>; signal?: AbortSignal } = {},
  ) =>
    fetch(url + path, {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "content-type": "application/json", ...headers },
      ...(signal === undefined ? {} : { signal }),
    });
  return { model, engine, connector, url, post };
}
