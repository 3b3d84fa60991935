import type { RankGeometry } from "@kv/plan";

/**
 * A consumer's rank in the words in which it plans for itself. Handshakes leave out what the other side of a pull need not know of a reader:
 * how its convolution state is divided. It is divided as here, in its own size, or the two would not be of one model.
 */
export function consumerGeometry(told: RankGeometry, ours: RankGeometry): RankGeometry {
  const [state, mine] = [told.stateSpace, ours.stateSpace];
  if (state === undefined || state.convProjectionBytes !== undefined) return told;
  if (mine?.convProjectionBytes === undefined || mine.convBytes === 0) return told;
  const { convBytes } = mine;
  const convProjectionBytes = mine.convProjectionBytes.map((bytes) => (bytes * state.convBytes) / convBytes);
  if (!convProjectionBytes.every(Number.isInteger)) return told;
  return { ...told, stateSpace: { ...state, convProjectionBytes } };
}
