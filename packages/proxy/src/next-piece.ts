import type { Deadline } from "./deadline.js";
import type { LegAnswer } from "./leg-order.js";

/** More of an instance's answer; undefined at its end. Errors: the upstream's; the deadline ends where nothing comes for `stallMs`. */
export async function nextPiece(
  { rest, visit }: LegAnswer,
  deadline: Deadline,
  stallMs: number,
): Promise<Uint8Array | undefined> {
  if (rest === undefined) return undefined;
  const { role, url } = visit.instance;
  deadline.enter(`waiting for more from the ${role} instance ${url}`, stallMs);
  const { value } = await rest.next();
  deadline.pause();
  return value;
}
