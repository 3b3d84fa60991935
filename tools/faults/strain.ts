import type { SeededRandom } from "@kv/transport-memory";

/** What may befall a notification: it is lost, refused, sent twice, sent late; one sent long ago comes again; a damaged one comes first. */
export type NotifyStrain = "lost" | "refused" | "twice" | "late" | "stale" | "damaged";
/** A transfer: its bytes move and it fails; it begins late; it hangs until it is given up. */
export type TransferStrain = "failed" | "late" | "hangs";
/** A question on the side channel: nobody answers, nobody is there, noise is answered; or junk is sent to the listener first. */
export type RequestStrain = "unanswered" | "unreachable" | "noise" | "junk";

/** Of a hundred operations each. */
export const NOTIFY_STRAINS: Readonly<Record<NotifyStrain, number>> = {
  lost: 2,
  refused: 1,
  twice: 3,
  late: 2,
  stale: 2,
  damaged: 3,
};
export const TRANSFER_STRAINS: Readonly<Record<TransferStrain, number>> = {
  failed: 1.5,
  late: 3,
  hangs: 0.5,
};
export const REQUEST_STRAINS: Readonly<Record<RequestStrain, number>> = {
  unanswered: 1,
  unreachable: 2,
  noise: 2,
  junk: 3,
};

/** Decides by chance what befalls an operation, and counts what was decided. */
export interface Strain {
  readonly random: SeededRandom;
  draw<Kind extends string>(operation: string, chances: Readonly<Record<Kind, number>>): Kind | undefined;
  counts(): Readonly<Record<string, number>>;
  /** Nothing goes wrong from now on. */
  end(): void;
}

export function createStrain(random: SeededRandom): Strain {
  const counts: Record<string, number> = {};
  let over = false;
  return {
    random,
    draw<Kind extends string>(operation: string, chances: Readonly<Record<Kind, number>>) {
      let left = random.next() * 100;
      if (over) return undefined;
      for (const [kind, chance] of Object.entries<number>(chances)) {
        left -= chance;
        if (left >= 0) continue;
        const name = `${operation} ${kind}`;
        counts[name] = (counts[name] ?? 0) + 1;
        return kind as Kind;
      }
      return undefined;
    },
    counts: () => ({ ...counts }),
    end() {
      over = true;
    },
  };
}
