import {
  decodeAgentMetadata,
  describeRank,
  encodeAgentMetadata,
  localGeometry,
  remoteGeometry,
} from "@kv/connector";
import { memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { simConfig } from "../test/sim-config.js";
import { createSimRanks } from "../test/sim-ranks.js";

const rank = { tpRank: 0, tpSize: 1 };
function local() {
  const ranks = createSimRanks({
    transport: memoryTransport(),
    config: simConfig(16),
    tpSize: 1,
    numBlocks: 4,
  });
  const [caches] = ranks.caches;
  if (caches === undefined) throw new Error("no rank");
  return localGeometry(caches, rank);
}

describe("rank geometry", () => {
  it("says the same on the other side of a handshake", () => {
    const here = local();
    const identity = { engineId: "e", agentMetadata: new Uint8Array([1]) };
    const told = decodeAgentMetadata(encodeAgentMetadata(describeRank(here, identity)));
    expect(remoteGeometry(told, rank, here)).toEqual(here);
  });

  it("takes what an older peer leaves out to be as here", () => {
    const here = local();
    const { regionNumBlocks, regionGroupIds, regionNames, regionMemoryTypes, ...old } = describeRank(here, {
      engineId: "e",
      agentMetadata: new Uint8Array([1]),
    });
    expect([regionNumBlocks, regionGroupIds, regionNames, regionMemoryTypes]).not.toContain(undefined);
    expect(remoteGeometry(old, rank, here)).toEqual(here);
  });

  it("finds a pipeline stage's regions here by name, and refuses a stage that does not name them", () => {
    const [first, second] = local().regions;
    if (first === undefined || second === undefined) throw new Error("two layers are needed");
    const here = { ...local(), regions: [first, { ...second, memoryType: "VRAM" as const }] };
    const told = describeRank(
      { ...here, regions: [second] },
      { engineId: "e", agentMetadata: new Uint8Array([1]) },
    );
    const { regionMemoryTypes: _, ...stage } = told;
    const place = { ...rank, ppRank: 1, ppSize: 2 };
    expect(remoteGeometry(stage, place, here)).toMatchObject({
      ...place,
      regions: [{ name: "layers.1", memoryType: "VRAM" }],
    });
    const { regionNames: __, ...nameless } = stage;
    expect(() => remoteGeometry(nameless, place, here)).toThrow(
      /stage 1 of engine e does not name its 1 regions/,
    );
  });

  it("tells the sizes of states, and takes the pages of packed rows", () => {
    const here = {
      ...local(),
      stateSpace: { convProjectionBytes: [32, 16, 16], convBytes: 64, recurrentBytes: 128 },
    };
    const metadata = {
      ...describeRank(here, { engineId: "e", agentMetadata: new Uint8Array([1]) }),
      packedMemberLayouts: { "layers.0": [0, 512] },
    };
    expect(metadata.ssmSizes).toEqual([64, 128]);
    expect(remoteGeometry(metadata, rank, here)).toMatchObject({
      stateSpace: { convBytes: 64, recurrentBytes: 128 },
      packedMembers: { "layers.0": { offsetBytes: 0, lengthBytes: 512 } },
    });
  });

  it("refuses states that reach into the next block", () => {
    const here = { ...local(), stateSpace: { convBytes: 2 ** 20, recurrentBytes: 1 } };
    const metadata = describeRank(here, { engineId: "e", agentMetadata: new Uint8Array([1]) });
    expect(() => remoteGeometry(metadata, rank, here)).toThrow(
      /remote rank 0, region "layers.0": a state of 1048576 \+ 1 bytes/,
    );
  });

  it("refuses prefill context parallelism", () => {
    const here = local();
    const told = describeRank(here, { engineId: "e", agentMetadata: new Uint8Array([1]) });
    expect(() => remoteGeometry({ ...told, pcpSize: 2 }, rank, here)).toThrow(/context parallelism of 2/);
  });
});
