import type { Clock, Random, SideChannel, Transport } from "@kv/interface";

/**
 * Where the engines of a scene run. `sceneNetwork` of `@kv/transport-memory` is one in virtual time,
 * which plays an equal scene equally.
 */
export interface SceneNetwork {
  readonly clock: Clock;
  /** Starts a process on a host, after a kill also under the same name. */
  start(hostName: string): SceneProcess;
  /** Lets time pass until the work has settled. */
  settle<T>(work: Promise<T>): Promise<T>;
  /** Lets `ms` milliseconds pass. */
  advance(ms: number): Promise<void>;
  /**
   * Counts what is held or in flight, such as timers, registrations and listeners: all zero when
   * every engine is closed or killed.
   */
  outstanding(): Readonly<Record<string, number>>;
}

/** One process of an engine. The suite closes transport and side channel. */
export interface SceneProcess {
  readonly clock: Clock;
  readonly random: Random;
  readonly transport: Transport;
  readonly sideChannel: SideChannel;
  /** As SIGKILL: its transfers, timers, memory and listeners are gone. */
  kill(): void | Promise<void>;
}
