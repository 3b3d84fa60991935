export interface Libs {
  readonly platform: string;
  readonly machine: "x86_64" | "aarch64";
  readonly name: string;
  readonly wheels: readonly { readonly requirement: string; readonly sha256: string }[];
  readonly folder: string;
  readonly nixl: string;
  readonly libfabric: string;
}
export const LIBS: readonly Libs[];
export const LIMITS: { readonly packed: number; readonly unpacked: number };
export const FROM_OPENMPI: readonly string[];
export const STAND_INS: Readonly<Record<string, string>>;
export function chosenFiles(folder: string): string[];
export function withoutAttribution(libs: Libs, paths: readonly string[]): string[];
export function filesBelow(folder: string): string[];
export function bytesBelow(folder: string): number;
export function libsAreCurrent(libs: Libs): boolean;
