export const LIBS_PACKAGE: string;
export const LIBS_FOLDER: string;
export const LIMITS: { readonly packed: number; readonly unpacked: number };
export function chosenFiles(folder: string): string[];
export function withoutAttribution(paths: readonly string[]): string[];
export function filesBelow(folder: string): string[];
export function bytesBelow(folder: string): number;
export function libsAreCurrent(): boolean;
