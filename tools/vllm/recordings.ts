import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { PEER_DIR } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";

/**
 * The folder of a pair's recording. It is kept, so that a run against another version can be
 * compared with it.
 */
export function recordingFolder(
  { version, mode }: PeerKind,
  prefillTp: number,
  decodeTp: number,
): string {
  const folder = join(PEER_DIR, "recordings", `${mode}-p${prefillTp}d${decodeTp}-${version}`);
  mkdirSync(folder, { recursive: true });
  return folder;
}

export const kindFolder = (name: string) => join(PEER_DIR, "recordings", name);
