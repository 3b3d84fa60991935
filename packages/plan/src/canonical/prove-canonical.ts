import { KvError } from "@kv/interface";
import { type CanonicalLayer, canonicalPage, canonicalShare } from "./canonical-page.js";

/**
 * Proves that the ranks of `reader` get their blocks from those of `writer`, through a common
 * canonical page. Each byte, labelled by K or V, head, token and place, must be written once.
 * @throws `KV_PLAN_INVALID` with the first wrong byte, `KV_PLAN_UNSUPPORTED`.
 */
export function proveCanonical(writer: CanonicalLayer, reader: CanonicalLayer): void {
  const page = new Map<number, string>();
  const { pageBytes } = canonicalPage(reader, 0);
  const { numWriters } = canonicalPage(writer, 0);
  // Ranks with the same bytes take turns, so every turn must be right.
  for (let turn = 0; turn < numWriters; turn += 1) {
    page.clear();
    for (let rank = 0; rank < ranksOf(writer); rank += 1) {
      const { runs, writerIndex } = canonicalPage(writer, rank);
      if (writerIndex !== turn) continue;
      const labels = labelsOf(writer, rank);
      for (const { localOffset, canonicalOffset, lengthBytes } of runs)
        for (let byte = 0; byte < lengthBytes; byte += 1) {
          if (page.has(canonicalOffset + byte))
            throw wrong(`byte ${canonicalOffset + byte} is written twice, by rank ${rank} last`);
          page.set(canonicalOffset + byte, labels[localOffset + byte] ?? "nothing");
        }
    }
    if (page.size !== pageBytes)
      throw wrong(`${page.size} bytes are written, and a page has ${pageBytes}`);

    for (let rank = 0; rank < ranksOf(reader); rank += 1) {
      const labels = labelsOf(reader, rank);
      let at = 0;
      for (const { localOffset, canonicalOffset, lengthBytes } of canonicalPage(reader, rank).runs)
        for (let byte = 0; byte < lengthBytes; byte += 1, at += 1) {
          const got = page.get(canonicalOffset + byte);
          if (localOffset + byte !== at || got !== labels[at])
            throw wrong(`byte ${at} of rank ${rank} is ${labels[at]}, and ${got} arrives`);
        }
      if (at !== labels.length)
        throw wrong(`${at} bytes of rank ${rank} arrive, and its block has ${labels.length}`);
    }
  }
}

const ranksOf = ({ tpSize, pcpSize = 1 }: CanonicalLayer): number => tpSize * pcpSize;

function labelsOf(layer: CanonicalLayer, rank: number): string[] {
  const { form, order, blockSize, headBytes } = layer;
  const { heads, firstHead, tokenAt } = canonicalShare(layer, rank);
  const labels: string[] = [];
  const add = (part: string, head: number, token: number) => {
    for (let byte = 0; byte < headBytes; byte += 1)
      labels.push(`${part} of head ${firstHead + head}, token ${tokenAt(token)}, byte ${byte}`);
  };
  const parts =
    form === "latent" ? [["latent"]] : form === "packed" ? [["K", "V"]] : [["K"], ["V"]];
  const [outer, inner] = order === "HND" ? [heads, blockSize] : [blockSize, heads];
  for (const together of parts)
    for (let row = 0; row < outer; row += 1)
      for (let column = 0; column < inner; column += 1)
        for (const part of together)
          if (order === "HND") add(part, row, column);
          else add(part, column, row);
  return labels;
}

const wrong = (what: string): KvError => new KvError("KV_PLAN_INVALID", `canonical page: ${what}`);
