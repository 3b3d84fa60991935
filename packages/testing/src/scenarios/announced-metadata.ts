import { delegateTo } from "@kv/connector/building-blocks";
import type { ConnectorModule } from "@kv/interface";
import {
  type AgentMetadata,
  decodeAgentMetadata,
  decodeHandshakePayload,
  encodeAgentMetadata,
  encodeHandshakePayload,
} from "@kv/protocol";

/** The connector of an engine that announces other values in its handshakes, as one with another parallelism would. */
export function announcing(connector: ConnectorModule, change: Partial<AgentMetadata>): ConnectorModule {
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
