#!/usr/bin/env bash
# Stands in for the AWS CLI: notes its command line in $FAKE/log, and knows two
# machines and one bucket, which are there while $FAKE/up and $FAKE/bucket are.
set -euo pipefail
echo "aws $*" >>"$FAKE/log"
case "$*" in
  *get-caller-identity*) echo 123456789012 ;;
  *describe-vpcs*) echo vpc-1 ;;
  *type-offerings*) echo us-east-1a ;;
  *describe-subnets*) echo subnet-1 ;;
  *create-security-group*) echo sg-1 ;;
  *run-instances*--iam-instance-profile*)
    if [ ! -e "$FAKE/known" ]; then
      touch "$FAKE/known"
      echo "Invalid IAM Instance Profile name" >&2
      exit 254
    fi
    touch "$FAKE/up"
    echo i-1
    ;;
  *run-instances*) echo i-2 ;;
  *terminate-instances*) rm "$FAKE/up" ;;
  *describe-instances*Address*) echo 192.0.2.7 ;;
  *describe-instances*) [ ! -e "$FAKE/up" ] || printf 'i-1\ti-2\n' ;;
  *create-bucket*) touch "$FAKE/bucket" ;;
  *delete-bucket*) rm "$FAKE/bucket" ;;
  *head-bucket*) [ -e "$FAKE/bucket" ] || { echo "An error occurred (404): Not Found" >&2; exit 254; } ;;
  *get-resources*) echo arn:aws:s3:::perdure-bench-t1-123456789012 ;;
  *describe-* | *list-*) echo None ;;
esac
