import { type AmbientOptions, silentLog, type Transport } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { held } from "@kv/testing/nothing-left";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { expect, onTestFinished } from "vitest";
import { BlockPool, type CacheChange } from "../../src/engine/cache/block-pool.js";
import { CacheTier } from "../../src/engine/cache/cache-tier.js";
import { KvPool } from "../../src/engine/cache/kv-pool.js";
import { Engine } from "../../src/engine/engine.js";
import { arithmeticModel } from "./arithmetic-model.js";
import { BLOCK, PROMPT } from "./tier-prompt.js";

export type TransportKind = "memory" | "NIXL";

const network = memoryNetwork();
let hosts = 0;

export function transportOf(kind: TransportKind, on = network): Transport {
  hosts += 1;
  return kind === "NIXL"
    ? nixlTransport()
    : memoryTransport({ network: on, host: `tier-host-${hosts}` });
}

/** Members of the test that is running. */
let opened = 0;

/** The last one that closes looks for what is left on the network. */
function closesAfterTest(close: () => Promise<unknown>): void {
  opened += 1;
  onTestFinished(async () => {
    await close();
    opened -= 1;
    if (opened === 0) expect(held(network.outstanding())).toEqual({});
  });
}

export interface MemberOptions extends AmbientOptions {
  readonly transport?: Transport;
  readonly tp?: number;
  readonly numBlocks?: number;
  readonly model?: string;
}

/** An engine with a tier. */
export async function tierMember({
  transport = transportOf("memory"),
  tp = 1,
  numBlocks = 64,
  model: name = "m",
  log = silentLog,
  clock,
}: MemberOptions = {}) {
  const model = arithmeticModel();
  const pool = new KvPool({ transport, geometry: model.config, numBlocks, blockSize: BLOCK, tp });
  const changes: CacheChange[] = [];
  const blocks = new BlockPool({ numBlocks, onChange: (change) => void changes.push(change) });
  const at = { transport, host: "127.0.0.1", port: 0, promptBlocks: 20, log, clock };
  const tier = await CacheTier.open({ ...at, pool, blocks, model: name });
  const engine = new Engine({ model, pool, blocks, tier, log, clock });
  closesAfterTest(async () => {
    await engine.close();
    expect(blocks.held).toBe(0);
    await tier.close();
    expect(tier.servedBlocks).toBe(0);
    pool.close();
    await transport.close();
  });
  const ask = (source?: string, prompt: readonly number[] = PROMPT) => {
    hosts += 1;
    const [, remote_host, port] = /^(.*):(\d+)$/.exec(source ?? "") ?? [];
    const remote_kv_source = { kv_request_id: "one", remote_host, remote_port: Number(port) };
    return engine.submit({
      requestId: `request-${hosts}`,
      promptTokens: prompt,
      maxTokens: 4,
      kvTransferParams: source === undefined ? undefined : { remote_kv_source },
    });
  };
  return { tier, engine, model, blocks, changes, ask };
}
