import { addRun, type Runs, reserveRuns } from "./run-order.js";

export interface BlockLists {
  readonly localIds: readonly number[];
  readonly remoteIds: readonly number[];
  /** Parts of a logical block. */
  readonly localPer: number;
  readonly remotePer: number;
  /** Where the pairing begins, in parts, and how many there are. */
  readonly localStart: number;
  readonly remoteStart: number;
  readonly count: number;
}

/** Pairs two block lists part by part, and adds what is consecutive on both sides as one run each. */
export function addBlockRuns(runs: Runs, lists: BlockLists): void {
  const { localIds, remoteIds, localPer, remotePer, localStart, remoteStart, count } = lists;
  if (localPer === remotePer && localStart % localPer === 0 && remoteStart % remotePer === 0) {
    addWholeBlocks(runs, lists);
    return;
  }
  let done = 0;
  while (done < count) {
    const [localAt, remoteAt] = [localStart + done, remoteStart + done];
    const [localPart, remotePart] = [localAt % localPer, remoteAt % remotePer];
    const length = Math.min(localPer - localPart, remotePer - remotePart, count - done);
    const local = (localIds[(localAt - localPart) / localPer] as number) * localPer + localPart;
    const remote = (remoteIds[(remoteAt - remotePart) / remotePer] as number) * remotePer + remotePart;
    addRun(runs, local, remote, length);
    done += length;
  }
}

/** The common case: blocks of one size, a step per block. */
function addWholeBlocks(runs: Runs, lists: BlockLists): void {
  const { localIds, remoteIds, localPer: per, localStart, remoteStart, count } = lists;
  const [skipLocal, skipRemote] = [localStart / per, remoteStart / per];
  const blocks = Math.ceil(count / per);
  const last = count - (blocks - 1) * per;
  const goesOn = (index: number) =>
    localIds[index + skipLocal] === (localIds[index + skipLocal - 1] as number) + 1 &&
    remoteIds[index + skipRemote] === (remoteIds[index + skipRemote - 1] as number) + 1;
  let found = 1;
  for (let index = 1; index < blocks; index++) if (!goesOn(index)) found += 1;
  reserveRuns(runs, found);
  let begin = 0;
  for (let end = 1; end <= blocks; end++) {
    if (end < blocks && goesOn(end)) continue;
    const length = (end - begin - 1) * per + (end === blocks ? last : per);
    const [local, remote] = [localIds[begin + skipLocal] as number, remoteIds[begin + skipRemote] as number];
    addRun(runs, local * per, remote * per, length);
    begin = end;
  }
}
