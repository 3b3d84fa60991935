import type { RankGeometry } from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";

/** A rank as its handshake tells it, in the words of plans. What an older server leaves out has vLLM's default. */
export function geometryOf(metadata: AgentMetadata, rank: { tpRank: number; tpSize: number }): RankGeometry {
  return {
    ...rank,
    dcpSize: metadata.dcpSize,
    kernelBlockSize: metadata.blockSize,
    physicalBlocksPerLogical: metadata.physicalBlocksPerLogical,
    layout: metadata.kvCacheLayout,
    attentionBackend: metadata.attentionBackend,
    deviceId: metadata.deviceId,
    regions: metadata.baseAddresses.map((baseAddress, index) => {
      const blockLengthBytes = metadata.blockLengthsBytes[index] ?? 0;
      return {
        name: metadata.regionNames?.[index] ?? `region ${index}`,
        baseAddress,
        numBlocks: metadata.regionNumBlocks?.[index] ?? metadata.numBlocks,
        blockLengthBytes,
        blockStrideBytes: metadata.blockStridesBytes[index] ?? blockLengthBytes,
        groupId: metadata.regionGroupIds?.[index] ?? 0,
        memoryType: metadata.regionMemoryTypes?.[index] ?? "DRAM",
      };
    }),
  };
}
