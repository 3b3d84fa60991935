import { delegateTo } from "@kv/connector/building-blocks";
import type { ConnectorModule } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakePayload,
  encodeAgentMetadata,
  encodeHandshakePayload,
} from "@kv/protocol";
import { expect, it } from "vitest";
import { createScenario } from "./scenario.js";

function announcing(connector: ConnectorModule, change: Partial<AgentMetadata>): ConnectorModule {
  return {
    ...connector,
    async createWorker(options) {
      const worker = await connector.createWorker(options);
      return delegateTo(worker, {
        async handshakeMetadata() {
          const told = await worker.handshakeMetadata();
          const { agentMetadataBytes, ...payload } = decodeHandshakePayload(told.payload);
          const metadata = { ...decodeAgentMetadata(agentMetadataBytes), ...change };
          return {
            ...told,
            payload: encodeHandshakePayload({
              ...payload,
              agentMetadataBytes: encodeAgentMetadata(metadata),
            }),
          };
        },
      });
    },
  };
}

/** A producer that no engine of this project is. */
export function itReadsAnnouncedMetadata(connector: ConnectorModule): void {
  it("a producer with prefill context parallelism serves a D, as in vLLM 0.33", async () => {
    const play = createScenario({ connector });
    const { p, d } = await play.pair({
      connector: announcing(connector, { pcpSize: 2 }),
      tpSize: 2,
    });
    await play.serves(p, d);
  });

  it("a state that is replicated on every rank (ple_block_len) is refused at the handshake, with the model's name", async () => {
    const play = createScenario({ connector });
    const replicated = announcing(connector, { pleBlockLengthBytes: 4096 });
    const p = await play.engine("p", { connector: replicated, model: "sim-ple" });
    const d = await play.engine("d", { model: "sim-ple" });
    expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
    expect(JSON.stringify(play.logged("d", "receive-failed"))).toMatch(
      /model sim-ple: engine p has a state .*ple_block_len/,
    );
  });
}
