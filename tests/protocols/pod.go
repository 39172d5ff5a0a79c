package main

import (
	"reflect"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// described is a file with the messages of a Go type of Kubernetes and of all
// that it refers to, as the tags of their fields say. These types marshal by
// themselves and have no descriptor.
func described(root reflect.Type, pkg string) *descriptorpb.FileDescriptorProto {
	file := &descriptorpb.FileDescriptorProto{Package: proto.String(pkg)}
	seen := map[reflect.Type]bool{}
	var describe func(reflect.Type)
	describe = func(t reflect.Type) {
		if seen[t] {
			return
		}
		seen[t] = true
		message := &descriptorpb.DescriptorProto{Name: proto.String(t.Name())}
		for i := range t.NumField() {
			tag := strings.Split(t.Field(i).Tag.Get("protobuf"), ",")
			if len(tag) < 4 {
				continue
			}
			number, err := strconv.Atoi(tag[1])
			if err != nil {
				panic(err)
			}
			field := &descriptorpb.FieldDescriptorProto{
				Name:   proto.String(strings.TrimPrefix(tag[3], "name=")),
				Number: proto.Int32(int32(number)),
				Label:  descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
			}
			of := t.Field(i).Type
			if of.Kind() == reflect.Pointer {
				of = of.Elem()
			}
			if of.Kind() == reflect.Map || of.Kind() == reflect.Slice && of.Elem().Kind() != reflect.Uint8 {
				field.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
				key := of.Kind() == reflect.Map
				of = of.Elem()
				if key && of.Kind() != reflect.Struct {
					continue // texts by text: of no use here
				}
			}
			switch of.Kind() {
			case reflect.Struct:
				field.Type = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum()
				field.TypeName = proto.String("." + pkg + "." + of.Name())
				describe(of)
			case reflect.String:
				field.Type = descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum()
			case reflect.Bool:
				field.Type = descriptorpb.FieldDescriptorProto_TYPE_BOOL.Enum()
			case reflect.Int32:
				field.Type = descriptorpb.FieldDescriptorProto_TYPE_INT32.Enum()
			case reflect.Int64:
				field.Type = descriptorpb.FieldDescriptorProto_TYPE_INT64.Enum()
			default:
				continue
			}
			message.Field = append(message.Field, field)
		}
		file.MessageType = append(file.MessageType, message)
	}
	describe(root)
	return file
}
