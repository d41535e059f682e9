#!/usr/bin/env bash
# Makes a folder with what python:3.11-slim-bookworm has, of Debian's packages and a Python: base.sh FOLDER MIRROR PYTHON
set -euo pipefail
base="$1" mirror="$2" python="$3"
packages=ca-certificates,libssl3,libsqlite3-0,libffi8,zlib1g,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libexpat1,libuuid1
debootstrap --variant=minbase --include="$packages" bookworm "$base" "$mirror"
# As Debian's slim images: no manuals, and of the documents the licences.
find "$base/usr/share/doc" -type f ! -name copyright -delete
rm -rf "$base"/usr/share/{groff,info,lintian,locale,man} "$base"/var/cache/apt/{archives/*.deb,*.bin} "$base"/var/lib/apt/lists/*
# What an official Python image has at this place: no symbols, tests, installed packages or static libraries.
tar -C "$python" -c --exclude='__pycache__' --exclude='test' --exclude='tests' --exclude='idle_test' --exclude='*.a' \
    --exclude='site-packages/*' --exclude='bin/pip*' bin lib include |
    tar -C "$base/usr/local" -x
find "$base/usr/local" -name '*.so*' -type f -exec strip --strip-unneeded {} +
ln -sf python3.11 "$base/usr/local/bin/python3"
# The mirrors' authorities, as this machine trusts them.
cp /etc/ssl/certs/ca-certificates.crt "$base/etc/ssl/certs/ca-certificates.crt"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > "$base/etc/pip.conf"
echo /usr/local/lib > "$base/etc/ld.so.conf.d/python.conf"
chroot "$base" ldconfig
chroot "$base" python3 -m ensurepip  # Official images bring pip, too.
chroot "$base" python3 -c 'import ssl, sqlite3, ctypes, bz2, lzma, zlib, readline, uuid'
find "$base/usr/local" -name __pycache__ -type d -exec rm -rf {} +
